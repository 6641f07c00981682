#include "strata/cli/inspection.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "strata/base/error.h"
#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;
using Role = format::TensorRole;

constexpr checkpoint::RingOptions kStreaming{8, 4_MiB};
constexpr std::size_t kFilesShown = 32;
// Members of a checkpoint's training record that are shown.
constexpr std::array<const char*, 5> kTrainingKeys{"global_steps", "micro_steps", "skipped_steps",
                                                   "loss_scale", "written_by"};

void count_tensor(const format::ManifestTensor& tensor, TensorCount& count) {
  ++count.tensors;
  count.trainable += tensor.trainable ? 1U : 0U;
  count.elements += *format::checked_numel(tensor.shape);
  ++count.dtypes[std::string(name_of(tensor.dtype))];
}

// Texts of a manifest may hold anything; a terminal gets no control bytes of them.
std::string shown(const std::string& text) {
  const std::string quoted = format::in_quotes(text);
  return quoted.back() == '\'' ? quoted.substr(1, quoted.size() - 2) : quoted;
}

// "strata 0.1.0, torch 2.11.0" of an object with these members.
std::string text_of_value(const Json& value) {
  if (value.is_object()) {
    std::vector<std::string> parts;
    for (const auto& [key, member] : value.items())
      parts.push_back(shown(key) + " " +
                      shown(member.is_string() ? member.get<std::string>() : member.dump()));
    return fmt::format("{}", fmt::join(parts, ", "));
  }
  return shown(value.is_string() ? value.get<std::string>() : value.dump());
}

// "100 (400 micro-steps, 2 skipped)"; empty where the record does not say.
std::string steps_text(const Json& training) {
  const auto has = [&](const char* key) { return training.contains(key); };
  if (!has("global_steps")) return "";
  std::vector<std::string> more;
  if (has("micro_steps")) more.push_back(text_of_value(training["micro_steps"]) + " micro-steps");
  if (has("skipped_steps")) more.push_back(text_of_value(training["skipped_steps"]) + " skipped");
  const std::string steps = text_of_value(training["global_steps"]);
  return more.empty() ? steps : fmt::format("{} ({})", steps, fmt::join(more, ", "));
}

std::string count_text(const TensorCount& count) {
  std::vector<std::string> dtypes;
  for (const auto& [dtype, tensors] : count.dtypes)
    dtypes.push_back(fmt::format("{} {}", tensors, dtype));
  return fmt::format("{} of {} elements ({})",
                     with_commas(static_cast<std::int64_t>(count.tensors)),
                     with_commas(count.elements.value), fmt::join(dtypes, ", "));
}

std::string kinds_table(const Inspection& inspection) {
  TextTable table({"kind", "stored as", "elements", "bytes", ""});
  table.align_left(1);
  Bytes sum;
  for (const KindCount& kind : inspection.kinds) {
    std::vector<std::string> dtypes;
    for (const auto& [dtype, elements] : kind.stored_as) dtypes.push_back(dtype);
    table.add({shown(kind.kind), fmt::format("{}", fmt::join(dtypes, ", ")),
               with_commas(kind.elements.value), with_commas(kind.bytes.value),
               to_string(kind.bytes)});
    sum += kind.bytes;
  }
  table.add_line();
  table.add({"total", "", "", with_commas(sum.value), to_string(sum)});
  return table.text();
}

std::string files_table(const Inspection& inspection) {
  TextTable table({"file", "bytes", ""});
  const auto& files = inspection.files;
  for (std::size_t i = 0; i < std::min(files.size(), kFilesShown); ++i)
    table.add({files[i].first, with_commas(files[i].second.value), to_string(files[i].second)});
  if (files.size() > kFilesShown)
    table.add({fmt::format("and {} more (--json lists all)", files.size() - kFilesShown)});
  table.add_line();
  table.add({count_of(files.size(), "file"), with_commas(inspection.total.value),
             to_string(inspection.total)});
  return table.text();
}

std::string verdict_text(const Inspection& inspection) {
  if (!inspection.whole()) {
    std::string text = fmt::format("WRONG: {}\n", count_of(inspection.findings.size(), "finding"));
    for (const Finding& finding : inspection.findings) text += "  " + text_of(finding) + "\n";
    return text;
  }
  return inspection.verified ? "every byte is what was written\n"
                             : "all files are there at their sizes; --verify reads every byte\n";
}

Json json_of(const TensorCount& count) {
  return {{"tensors", count.tensors},
          {"trainable", count.trainable},
          {"elements", count.elements.value},
          {"dtypes", count.dtypes}};
}

Json json_of(const Finding& finding) {
  Json json = {{"file", finding.file}, {"problem", finding.problem}, {"tensors", finding.tensors}};
  if (finding.range) {
    json["begin"] = finding.range->begin.value;
    json["end"] = finding.range->end.value;
  }
  return json;
}

// Files of the manifest that are there, inside the folder and as long as they were.
std::vector<std::optional<io::File>> open_files(const std::string& folder,
                                                const format::Manifest& manifest,
                                                std::vector<Finding>& findings) {
  std::vector<std::optional<io::File>> files(manifest.files.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    try {
      files[i].emplace(checkpoint::open_file(folder, manifest.files[i]));
    } catch (const Error& error) {
      findings.push_back({manifest.files[i].name, std::nullopt, {}, error.what()});
    }
  }
  return files;
}

// Reads every byte of the files. Wrong blocks beside each other are one finding.
void verify(std::span<const std::optional<io::File>> files, const format::Manifest& manifest,
            io::IoEngine& io, const std::shared_ptr<memory::Ledger>& ledger, Console& console,
            std::vector<Finding>& findings) {
  std::vector<checkpoint::ReadableFile> ways;
  std::vector<checkpoint::FileRange> ranges;
  Bytes total;
  for (std::size_t i = 0; i < files.size(); ++i) {
    ways.push_back({files[i] ? &*files[i] : nullptr, nullptr});
    if (!files[i]) continue;
    ranges.push_back({i, Bytes(), manifest.files[i].bytes});
    total += manifest.files[i].bytes;
  }
  std::vector<checkpoint::WrongRange> found;
  const checkpoint::Verification verification{
      manifest.files, true, [&](const checkpoint::WrongRange& wrong) {
        const bool follows = !found.empty() && found.back().file == wrong.file &&
                             found.back().end == wrong.begin &&
                             found.back().problem == wrong.problem;
        if (follows) {
          found.back().end = wrong.end;
        } else {
          found.push_back(wrong);
        }
      }};
  Progress progress("verifying", total, console);
  class Count final : public checkpoint::Sink {
   public:
    explicit Count(Progress& shown) : shown_(shown) {}
    std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
      shown_.add(piece.bytes);
      return nullptr;
    }

   private:
    Progress& shown_;
  } sink(progress);
  checkpoint::TransferRing ring(kStreaming, ledger);
  checkpoint::RangeSource source(ways, ranges, io, ring.buffer_bytes(),
                                 {.aligned = 16_B, .verify = &verification});
  copy(source, sink, ring);
  for (const checkpoint::WrongRange& wrong : found)
    findings.push_back({manifest.files[wrong.file].name, ByteRange{wrong.begin, wrong.end},
                        checkpoint::owners_of(manifest, wrong.file, wrong.begin, wrong.end),
                        wrong.problem});
}

// Looks at no file.
Inspection count_contents(const format::Manifest& manifest) {
  Inspection result;
  result.tag = manifest.tag;
  result.world_size = manifest.world_size;
  result.stage = manifest.stage;
  result.training = Json::parse(manifest.training);
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    result.tied += tensor.aliases.size();
    count_tensor(tensor, result.counts[tensor.role]);
  }
  for (const std::string& kind : manifest.kinds) result.kinds.push_back({kind, {}, {}, {}});
  for (const format::ManifestRange& extent : manifest.extents) {
    KindCount& kind = result.kinds[extent.kind];
    const Numel elements = extent.end - extent.begin;
    kind.stored_as[std::string(name_of(extent.dtype))] += elements;
    kind.elements += elements;
    kind.bytes += bytes_of(elements, extent.dtype);
  }
  for (const format::ManifestFile& file : manifest.files) {
    result.files.emplace_back(file.name, file.bytes);
    result.total += file.bytes;
  }
  return result;
}

}  // namespace

std::string text_of(const Finding& finding) {
  if (!finding.range) return finding.problem;
  return fmt::format("file {}: bytes [{}, {}): {}; they belong to {}",
                     format::in_quotes(finding.file), finding.range->begin.value,
                     finding.range->end.value, finding.problem,
                     finding.tensors.empty() ? "the header or the space between tensors"
                                             : format::first_ten(finding.tensors));
}

Inspection inspect(const std::string& path, bool every_byte, io::IoEngine& io,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  checkpoint::ChosenCheckpoint folder = checkpoint::choose_checkpoint(path);
  const format::Manifest manifest = format::read_manifest(folder.path);
  Inspection result = count_contents(manifest);
  result.verified = every_byte;
  const auto files = open_files(folder.path, manifest, result.findings);
  if (every_byte) verify(files, manifest, io, ledger, console, result.findings);
  result.folder = std::move(folder);
  return result;
}

std::string text_of(const Inspection& inspection) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<12} {}\n", name, value);
  };
  line("checkpoint", inspection.folder.path);
  line("tag", shown(inspection.tag));
  line("steps", steps_text(inspection.training));
  for (const char* key : {"loss_scale", "written_by"}) {
    if (inspection.training.contains(key) && !inspection.training[key].is_null())
      line(key[0] == 'l' ? "loss scale" : "written by", text_of_value(inspection.training[key]));
  }
  line("saved by", fmt::format("{} at stage {}",
                               count_of(static_cast<std::size_t>(inspection.world_size), "rank"),
                               inspection.stage));
  const TensorCount all = inspection.count(Role::kParameter);
  std::string parameters = count_text(all);
  if (const std::size_t frozen = all.tensors - all.trainable)
    parameters += fmt::format(", {} frozen", frozen);
  const Json without = inspection.training.value("without_frozen", Json());
  if (without == true) parameters += ", frozen ones not saved";
  if (inspection.tied > 0) parameters += fmt::format(", {} tied to another", inspection.tied);
  line("parameters", parameters);
  for (const auto& [role, name] : {std::pair(Role::kBuffer, "buffers"),
                                   {Role::kRankBuffer, "of ranks"},
                                   {Role::kClient, "client"}}) {
    if (inspection.counts.contains(role)) line(name, count_text(inspection.counts.at(role)));
  }
  if (!inspection.folder.tags.empty()) {
    std::vector<std::string> tags;
    for (const std::string& tag : inspection.folder.tags)
      tags.push_back(tag == inspection.folder.latest ? tag + " (latest)" : tag);
    line("tags", fmt::format("{}", fmt::join(tags, ", ")));
  }
  return text + "\n" + kinds_table(inspection) + "\n" + files_table(inspection) + "\n" +
         verdict_text(inspection);
}

Json json_of(const Inspection& inspection) {
  Json json = {{"path", inspection.folder.path},
               {"tag", inspection.tag},
               {"tags", inspection.folder.tags},
               {"latest", inspection.folder.latest},
               {"world_size", inspection.world_size},
               {"stage", inspection.stage},
               {"parameters", json_of(inspection.count(Role::kParameter))},
               {"buffers", json_of(inspection.count(Role::kBuffer))},
               {"rank_buffers", json_of(inspection.count(Role::kRankBuffer))},
               {"client", json_of(inspection.count(Role::kClient))},
               {"tied", inspection.tied},
               {"kinds", Json::array()},
               {"files", Json::array()},
               {"bytes", inspection.total.value},
               {"verified", inspection.verified},
               {"whole", inspection.whole()},
               {"findings", Json::array()}};
  for (const char* key : kTrainingKeys)
    json[key] = inspection.training.contains(key) ? inspection.training[key] : Json();
  for (const KindCount& kind : inspection.kinds) {
    Json dtypes = Json::object();
    for (const auto& [dtype, elements] : kind.stored_as) dtypes[dtype] = elements.value;
    json["kinds"].push_back({{"kind", kind.kind},
                             {"elements", kind.elements.value},
                             {"bytes", kind.bytes.value},
                             {"stored_as", dtypes}});
  }
  for (const auto& [name, bytes] : inspection.files)
    json["files"].push_back({{"name", name}, {"bytes", bytes.value}});
  for (const Finding& finding : inspection.findings) json["findings"].push_back(json_of(finding));
  return json;
}

}  // namespace strata::cli
