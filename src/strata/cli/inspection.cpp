#include "strata/cli/inspection.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <utility>

#include "strata/cli/text_table.h"
#include "strata/format/message_text.h"
#include "strata/format/tensor_info.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kFilesShown = 32;
// What a checkpoint's training record has for everybody to see.
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

TensorCount& count_of_role(Inspection& inspection, format::TensorRole role) {
  switch (role) {
    case format::TensorRole::kParameter:
      return inspection.parameters;
    case format::TensorRole::kBuffer:
      return inspection.buffers;
    case format::TensorRole::kRankBuffer:
      return inspection.rank_buffers;
    case format::TensorRole::kClient:
      break;
  }
  return inspection.client;
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

}  // namespace

Inspection count_contents(const format::Manifest& manifest) {
  Inspection result;
  result.tag = manifest.tag;
  result.world_size = manifest.world_size;
  result.stage = manifest.stage;
  result.training = Json::parse(manifest.training);
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    result.tied += tensor.aliases.size();
    count_tensor(tensor, count_of_role(result, tensor.role));
  }
  for (const std::string& kind : manifest.kinds) result.kinds.push_back({kind, {}, {}, {}});
  for (const format::ManifestExtent& extent : manifest.extents) {
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

Inspection inspect(const std::string& path, bool verify, io::IoEngine& io,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  ChosenCheckpoint folder = choose_checkpoint(path);
  const format::Manifest manifest = format::read_manifest(folder.path);
  Inspection result = count_contents(manifest);
  result.verified = verify;
  result.findings = verify ? verify_files(folder.path, manifest, io, ledger, console)
                           : check_files(folder.path, manifest);
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
  std::string parameters = count_text(inspection.parameters);
  if (const std::size_t frozen = inspection.parameters.tensors - inspection.parameters.trainable)
    parameters += fmt::format(", {} frozen", frozen);
  const Json without = inspection.training.value("without_frozen", Json());
  if (without == true) parameters += ", frozen ones not saved";
  if (inspection.tied > 0) parameters += fmt::format(", {} tied to another", inspection.tied);
  line("parameters", parameters);
  if (inspection.buffers.tensors > 0) line("buffers", count_text(inspection.buffers));
  if (inspection.rank_buffers.tensors > 0) line("of ranks", count_text(inspection.rank_buffers));
  if (inspection.client.tensors > 0) line("client", count_text(inspection.client));
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
               {"parameters", json_of(inspection.parameters)},
               {"buffers", json_of(inspection.buffers)},
               {"rank_buffers", json_of(inspection.rank_buffers)},
               {"client", json_of(inspection.client)},
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
