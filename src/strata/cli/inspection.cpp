#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/cli/commands.h"
#include "strata/format/safetensors.h"
#include "strata/io/thread_engine.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;
using Role = format::TensorRole;

constexpr checkpoint::RingOptions kStreaming{8, 4_MiB};
constexpr std::size_t kFilesShown = 32;
// Members of a checkpoint's training record that are shown.
constexpr std::array<const char*, 5> kTrainingKeys{"global_steps", "micro_steps", "skipped_steps",
                                                   "loss_scale", "written_by"};

// How many tensors of a role there are, of how many elements, and in which dtypes the model
// computes with them.
Json count_of_role(const format::Manifest& manifest, Role role) {
  std::size_t tensors = 0;
  std::size_t trainable = 0;
  Numel elements;
  std::map<std::string, std::size_t> dtypes;
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    if (tensor.role != role) continue;
    ++tensors;
    trainable += tensor.trainable ? 1U : 0U;
    elements += *format::checked_numel(tensor.shape);
    ++dtypes[std::string(name_of(tensor.dtype))];
  }
  return {{"tensors", tensors},
          {"trainable", trainable},
          {"elements", elements.value},
          {"dtypes", dtypes}};
}

// The elements of each kind in the files.
Json kinds_of(const format::Manifest& manifest) {
  Json kinds = Json::array();
  for (const std::string& kind : manifest.kinds)
    kinds.push_back({{"kind", kind}, {"elements", 0}, {"bytes", 0}, {"stored_as", Json::object()}});
  const auto add = [](Json& to, const std::string& key, std::int64_t number) {
    to[key] = to.value(key, std::int64_t{0}) + number;
  };
  for (const format::ManifestRange& extent : manifest.extents) {
    const Numel elements = extent.end - extent.begin;
    add(kinds[extent.kind], "elements", elements.value);
    add(kinds[extent.kind], "bytes", bytes_of(elements, extent.dtype).value);
    add(kinds[extent.kind]["stored_as"], std::string(name_of(extent.dtype)), elements.value);
  }
  return kinds;
}

// Texts of a manifest may hold anything; a terminal gets no control bytes of them.
std::string shown(const std::string& text) {
  const std::string quoted = format::in_quotes(text);
  return quoted.back() == '\'' ? quoted.substr(1, quoted.size() - 2) : quoted;
}

// "strata 0.1.0, torch 2.11.0" of an object with these members.
std::string text_of_value(const Json& value) {
  if (!value.is_object()) return shown(value.is_string() ? value.get<std::string>() : value.dump());
  std::vector<std::string> parts;
  for (const auto& [key, member] : value.items())
    parts.push_back(shown(key) + " " +
                    shown(member.is_string() ? member.get<std::string>() : member.dump()));
  return fmt::format("{}", fmt::join(parts, ", "));
}

// "100 (400 micro-steps, 2 skipped)"; empty where the record does not say.
std::string steps_text(const Json& training) {
  if (!training.contains("global_steps")) return "";
  std::vector<std::string> more;
  for (const auto& [key, noun] :
       {std::pair("micro_steps", "micro-steps"), {"skipped_steps", "skipped"}}) {
    if (training.contains(key)) more.push_back(text_of_value(training[key]) + " " + noun);
  }
  const std::string steps = text_of_value(training["global_steps"]);
  return more.empty() ? steps : fmt::format("{} ({})", steps, fmt::join(more, ", "));
}

std::string count_text(const Json& count) {
  std::vector<std::string> dtypes;
  for (const auto& [dtype, tensors] : count["dtypes"].items())
    dtypes.push_back(fmt::format("{} {}", tensors.get<std::size_t>(), dtype));
  return fmt::format("{} of {} elements ({})", with_commas(count["tensors"]),
                     with_commas(count["elements"]), fmt::join(dtypes, ", "));
}

std::string kinds_table(const Json& kinds) {
  TextTable table({"kind", "stored as", "elements", "bytes", ""});
  table.align_left(1);
  Bytes sum;
  for (const Json& kind : kinds) {
    std::vector<std::string> dtypes;
    for (const auto& [dtype, elements] : kind["stored_as"].items()) dtypes.push_back(dtype);
    const Bytes bytes(kind["bytes"].get<std::int64_t>());
    table.add({shown(kind["kind"]), fmt::format("{}", fmt::join(dtypes, ", ")),
               with_commas(kind["elements"]), with_commas(bytes.value), to_string(bytes)});
    sum += bytes;
  }
  table.add_line();
  table.add({"total", "", "", with_commas(sum.value), to_string(sum)});
  return table.text();
}

std::string files_table(const std::vector<format::ManifestFile>& files, Bytes total) {
  TextTable table({"file", "bytes", ""});
  for (std::size_t i = 0; i < std::min(files.size(), kFilesShown); ++i)
    table.add({files[i].name, with_commas(files[i].bytes.value), to_string(files[i].bytes)});
  if (files.size() > kFilesShown)
    table.add({fmt::format("and {} more (--json lists all)", files.size() - kFilesShown)});
  table.add_line();
  table.add({count_of(files.size(), "file"), with_commas(total.value), to_string(total)});
  return table.text();
}

// Files of the manifest that are there, inside the folder and as long as they were.
std::vector<std::optional<io::File>> open_files(const std::string& folder,
                                                const format::Manifest& manifest,
                                                Report& findings) {
  std::vector<std::optional<io::File>> files(manifest.files.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    try {
      files[i].emplace(checkpoint::open_file(folder, manifest.files[i]));
    } catch (const Error& error) {
      findings.json.push_back({{"file", manifest.files[i].name},
                               {"problem", error.what()},
                               {"tensors", Json::array()}});
      findings.text += fmt::format("  {}\n", error.what());
    }
  }
  return files;
}

// Reads every byte of the files. Wrong blocks beside each other are one finding.
void verify(std::span<const std::optional<io::File>> files, const format::Manifest& manifest,
            Console& console, Report& findings) {
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
        if (follows)
          found.back().end = wrong.end;
        else
          found.push_back(wrong);
      }};
  io::ThreadEngine io;
  Progress progress("verifying", total, console);
  checkpoint::Taker sink([&](const checkpoint::Piece& piece) {
    progress.add(piece.bytes);
    return nullptr;
  });
  checkpoint::TransferRing ring(kStreaming, nullptr);
  checkpoint::RangeSource source(ways, ranges, io, ring.buffer_bytes(),
                                 {.aligned = 16_B, .verify = &verification});
  copy(source, sink, ring);
  for (const checkpoint::WrongRange& wrong : found) {
    findings.json.push_back(
        {{"file", manifest.files[wrong.file].name},
         {"begin", wrong.begin.value},
         {"end", wrong.end.value},
         {"problem", wrong.problem},
         {"tensors", checkpoint::owners_of(manifest, wrong.file, wrong.begin, wrong.end)}});
    findings.text += fmt::format("  {}\n", text_of(manifest, wrong));
  }
}

std::string verdict_text(const Report& findings, bool verified) {
  if (!findings.json.empty())
    return fmt::format("WRONG: {}\n", count_of(findings.json.size(), "finding")) + findings.text;
  return verified ? "every byte is what was written\n"
                  : "all files are there at their sizes; --verify reads every byte\n";
}

// The lines before the tables.
std::string head_text(const Json& json, const Json& training) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    if (!value.empty()) text += fmt::format("{:<12} {}\n", name, value);
  };
  line("checkpoint", json["path"]);
  line("tag", shown(json["tag"]));
  line("steps", steps_text(training));
  for (const auto& [key, name] :
       {std::pair("loss_scale", "loss scale"), {"written_by", "written by"}}) {
    if (!json[key].is_null()) line(name, text_of_value(json[key]));
  }
  line("saved by", fmt::format("{} at stage {}", count_of(json["world_size"], "rank"),
                               json["stage"].get<int>()));
  const Json& all = json["parameters"];
  std::string parameters = count_text(all);
  if (all["tensors"] != all["trainable"])
    parameters += fmt::format(
        ", {} frozen", all["tensors"].get<std::size_t>() - all["trainable"].get<std::size_t>());
  if (training.value("without_frozen", Json()) == true) parameters += ", frozen ones not saved";
  if (json["tied"] > 0)
    parameters += fmt::format(", {} tied to another", json["tied"].get<std::size_t>());
  line("parameters", parameters);
  for (const auto& [key, name] :
       {std::pair("buffers", "buffers"), {"rank_buffers", "of ranks"}, {"client", "client"}}) {
    if (json[key]["tensors"] > 0) line(name, count_text(json[key]));
  }
  std::vector<std::string> tags = json["tags"];
  for (std::string& tag : tags) tag += json["latest"] == Json(tag) ? " (latest)" : "";
  line("tags", fmt::format("{}", fmt::join(tags, ", ")));
  return text;
}

}  // namespace

std::string text_of(const format::Manifest& manifest, const checkpoint::WrongRange& wrong) {
  const auto owners = checkpoint::owners_of(manifest, wrong.file, wrong.begin, wrong.end);
  return fmt::format(
      "file {}: bytes [{}, {}): {}; they belong to {}",
      format::in_quotes(manifest.files[wrong.file].name), wrong.begin.value, wrong.end.value,
      wrong.problem,
      owners.empty() ? "the header or the space between tensors" : format::first_ten(owners));
}

Report inspect(const InspectRequest& request, Console& console) {
  const checkpoint::ChosenCheckpoint folder = checkpoint::choose_checkpoint(request.path);
  const format::Manifest manifest = format::read_manifest(folder.path);
  const Json training = Json::parse(manifest.training);
  Report findings{Json::array(), ""};  // what is wrong
  const auto files = open_files(folder.path, manifest, findings);
  if (request.verify) verify(files, manifest, console, findings);
  std::size_t tied = 0;  // names that belong to a parameter of another name
  for (const format::ManifestTensor& tensor : manifest.tensors) tied += tensor.aliases.size();
  Bytes total;
  Json listed = Json::array();
  for (const format::ManifestFile& file : manifest.files) {
    listed.push_back({{"name", file.name}, {"bytes", file.bytes.value}});
    total += file.bytes;
  }
  Json json = {{"path", folder.path},
               {"tag", manifest.tag},
               {"tags", folder.tags},
               {"latest", folder.latest},
               {"world_size", manifest.world_size},
               {"stage", manifest.stage},
               {"parameters", count_of_role(manifest, Role::kParameter)},
               {"buffers", count_of_role(manifest, Role::kBuffer)},
               {"rank_buffers", count_of_role(manifest, Role::kRankBuffer)},
               {"client", count_of_role(manifest, Role::kClient)},
               {"tied", tied},
               {"kinds", kinds_of(manifest)},
               {"files", listed},
               {"bytes", total.value},
               {"verified", request.verify},
               {"whole", findings.json.empty()},
               {"findings", findings.json}};
  for (const char* key : kTrainingKeys) json[key] = training.value(key, Json());
  const std::string text = head_text(json, training) + "\n" + kinds_table(json["kinds"]) + "\n" +
                           files_table(manifest.files, total) + "\n" +
                           verdict_text(findings, request.verify);
  return {json, text, findings.json.empty()};
}

}  // namespace strata::cli
