#include "strata/cli/consolidation.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/cli/inspection.h"
#include "strata/cli/tensor_source.h"
#include "strata/format/manifest.h"
#include "strata/format/safetensors.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"
#include "strata/kernels/elementwise.h"
#include "strata/plan/channel_order.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr Bytes kBuffer = 1_MiB;

bool is_of_model(const std::string& name) {
  if (name == format::kManifestName || name == format::kIndexFileName) return false;
  const std::string extension = fs::path(name).extension().string();
  return extension == ".json" || extension == ".txt" || extension == ".jinja" ||
         extension == ".model";
}

// Whole or not at all.
void copy_whole(const std::string& from, const std::string& to) {
  const io::File source(from, io::File::Mode::kRead);
  io::AtomicFile target(to);
  std::vector<std::byte> buffer(kBuffer.size());
  const Bytes end = source.size();
  for (Bytes at; at < end; at += kBuffer) {
    const auto part = std::span(buffer).first(std::min(kBuffer, end - at).size());
    io::read_fully(source, at, part);
    io::write_fully(target.file(), at, part);
  }
  target.publish();
}

// Copies the files of the model beside its weights (config.json and the like), unchanged, each
// whole or not at all: regular files that hold text (.json, .txt, .jinja, .model), but for the
// manifest and what belongs to weights; follows no link. The names that were copied, in order.
std::vector<std::string> copy_model_files(const std::string& from, const std::string& to) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(from, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool regular = fs::is_regular_file(fs::symlink_status(entry->path(), error));
    if (regular && format::is_plain_file_name(name) && is_of_model(name)) names.push_back(name);
  }
  if (error) {
    throw IoError(fmt::format("cannot list a folder: path={} {}", from, errno_text(error.value())));
  }
  std::ranges::sort(names);
  for (const std::string& name : names)
    copy_whole((fs::path(from) / name).string(), (fs::path(to) / name).string());
  return names;
}

// Without checksums: what lies between two extents is read, too, where that is cheaper than a jump.
constexpr Bytes kGapRead = 64_KiB;

DType dtype_in(const format::ManifestTensor& tensor, const ConsolidationOptions& options) {
  return options.dtype && is_floating(tensor.dtype) ? *options.dtype : tensor.dtype;
}

// Casts the elements of extents and writes them to where their tensors lie.
class CastWriter final : public checkpoint::ExtentSink {
 public:
  CastWriter(std::span<const format::ManifestRange> extents,
             std::span<const format::ManifestTensor> tensors,
             std::span<const std::optional<std::size_t>> place_of,
             std::span<const format::TensorSpec> specs, format::ShardedWriter& writer,
             checkpoint::TransferRing& ring, Progress& progress)
      : ExtentSink(extents),
        extents_(extents),
        tensors_(tensors),
        place_of_(place_of),
        specs_(specs),
        progress_(progress),
        writer_(writer),
        ring_(ring) {}

  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    progress_.add(piece.bytes);
    return ExtentSink::take(piece);
  }
  void settle() override { ring_.drain(); }

 private:
  void take_elements(std::size_t extent, Bytes at, std::span<const std::byte> bytes) override {
    const format::ManifestRange& e = extents_[extent];
    if (tensors_[e.tensor].channels_last) {
      collect(e, at, bytes);
    } else {
      give(*place_of_[e.tensor], e.begin + Numel(at / size_of(e.dtype)), bytes, e.dtype);
    }
  }

  // Writes a channels_last tensor, in the order of its dimensions, once it has all elements.
  void collect(const format::ManifestRange& extent, Bytes at, std::span<const std::byte> bytes) {
    const std::vector<std::int64_t>& shape = tensors_[extent.tensor].shape;
    Collected& collected = collected_[extent.tensor];
    collected.bytes.resize(bytes_of(*format::checked_numel(shape), extent.dtype).size());
    const Bytes first = bytes_of(extent.begin, extent.dtype) + at;
    std::ranges::copy(bytes, collected.bytes.begin() + first.value);
    collected.filled += bytes.size();
    if (collected.filled < collected.bytes.size()) return;
    plan::reorder(collected.bytes, shape, size_of(extent.dtype), /*channels_last=*/false);
    give(*place_of_[extent.tensor], Numel(), collected.bytes, extent.dtype);
    collected_.erase(extent.tensor);
  }

  void give(std::size_t tensor, Numel first, std::span<const std::byte> bytes, DType stored) {
    const DType dtype = specs_[tensor].dtype;
    const Numel end = first + Numel(Bytes(bytes.size()) / size_of(stored));
    while (first < end) {
      const Numel count = std::min(Numel(ring_.buffer_bytes() / size_of(dtype)), end - first);
      const auto source = bytes.first(bytes_of(count, stored).size());
      const std::size_t turn = ring_.next();
      const auto target = ring_.buffer(turn).first(bytes_of(count, dtype).size());
      if (dtype == stored) {
        std::ranges::copy(source, target.begin());
      } else {
        kernels::cast(target.data(), dtype, source.data(), stored, count, nullptr);
      }
      ring_.started(turn, writer_.write(tensor, bytes_of(first, dtype), target));
      bytes = bytes.subspan(source.size());
      first += count;
    }
  }

  struct Collected {
    std::vector<std::byte> bytes;
    std::size_t filled = 0;
  };

  std::span<const format::ManifestRange> extents_;
  std::span<const format::ManifestTensor> tensors_;
  std::map<std::size_t, Collected> collected_;  // by the manifest's tensor
  std::span<const std::optional<std::size_t>> place_of_;
  std::span<const format::TensorSpec> specs_;
  Progress& progress_;
  format::ShardedWriter& writer_;
  checkpoint::TransferRing& ring_;
};

class Consolidation {
 public:
  Consolidation(const std::string& folder, const ConsolidationOptions& options, io::IoEngine& io,
                const std::shared_ptr<memory::Ledger>& ledger)
      : folder_(folder),
        options_(options),
        io_(io),
        manifest_(format::read_manifest(folder)),
        files_(folder, manifest_),
        read_ring_(options.ring, ledger),
        write_ring_(options.ring, ledger) {
    place_of_.resize(manifest_.tensors.size());
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) choose(t);
    for (const format::ManifestRange& extent : manifest_.extents) {
      if (extent.kind == 0 && place_of_[extent.tensor]) {
        check_cast(extent);
        extents_.push_back(extent);
      }
    }
  }

  Consolidated run(const std::string& out, Console& console) {
    format::ShardedWriterOptions options;
    options.shard_max = options_.shard_max;
    writer_.emplace(out, specs_, io_, options);
    stream(console);
    writer_->finish();
    return report(out);
  }

 private:
  void choose(std::size_t t) {
    const format::ManifestTensor& tensor = manifest_.tensors[t];
    const bool of_model =
        tensor.role == format::TensorRole::kParameter || tensor.role == format::TensorRole::kBuffer;
    if (!of_model) return;
    place_of_[t] = specs_.size();
    specs_.push_back({tensor.name, dtype_in(tensor, options_), tensor.shape});
  }

  void check_cast(const format::ManifestRange& extent) const {
    const format::TensorSpec& spec = specs_[*place_of_[extent.tensor]];
    const bool fits =
        extent.dtype == spec.dtype || (is_floating(extent.dtype) && is_floating(spec.dtype));
    if (fits) return;
    throw FormatError(fmt::format(
        "a tensor of a checkpoint is stored in a dtype that cannot become its own: tensor={} "
        "stored as={} wanted={} path={}",
        format::in_quotes(spec.name), name_of(extent.dtype), name_of(spec.dtype), folder_));
  }

  std::vector<checkpoint::FileRange> ranges() const {
    std::vector<checkpoint::FileRange> result;
    for (const format::ManifestRange& extent : extents_) {
      const Bytes end = checkpoint::end_of(extent);
      const bool near = !result.empty() && result.back().file == extent.file &&
                        result.back().offset + result.back().bytes + kGapRead >= extent.offset;
      if (near) {
        result.back().bytes = end - result.back().offset;
      } else {
        result.push_back({extent.file, extent.offset, end - extent.offset});
      }
    }
    return options_.verify ? checkpoint::whole_blocks(result, manifest_.files) : result;
  }

  void stream(Console& console) {
    const std::vector<checkpoint::FileRange> wanted = ranges();
    Bytes total;
    for (const checkpoint::FileRange& range : wanted) total += range.bytes;
    Progress progress("consolidating", total, console);
    const std::vector<checkpoint::ReadableFile> ways = files_.readable();
    const checkpoint::Verification verify{
        manifest_.files, options_.verify,
        [&](const checkpoint::WrongRange& wrong) { fail(wrong); }};
    checkpoint::RangeSource source(ways, wanted, io_, read_ring_.buffer_bytes(),
                                   {.aligned = 16_B, .verify = &verify});
    CastWriter sink(extents_, manifest_.tensors, place_of_, specs_, *writer_, write_ring_,
                    progress);
    copy(source, sink, read_ring_);
  }

  [[noreturn]] void fail(const checkpoint::WrongRange& wrong) const {
    const Finding finding{manifest_.files[wrong.file].name, ByteRange{wrong.begin, wrong.end},
                          checkpoint::owners_of(manifest_, wrong.file, wrong.begin, wrong.end),
                          wrong.problem};
    throw FormatError(
        fmt::format("a checkpoint is damaged, and nothing was written: {}; `strata inspect "
                    "--verify` lists all that is wrong: path={}",
                    text_of(finding), folder_));
  }

  Consolidated report(const std::string& out) const {
    Consolidated result;
    result.out = out;
    result.tensors = specs_.size();
    for (const format::TensorSpec& spec : specs_)
      result.elements += *format::checked_numel(spec.shape);
    result.bytes = writer_->plan().total;
    result.files = writer_->plan().files;
    const Json training = Json::parse(manifest_.training);
    result.without_frozen = training.value("without_frozen", Json()) == true;
    for (const format::ManifestTensor& tensor : manifest_.tensors) {
      for (const std::string& alias : tensor.aliases)
        result.aliases.emplace_back(alias, tensor.name);
    }
    return result;
  }

  std::string folder_;
  const ConsolidationOptions& options_;
  io::IoEngine& io_;
  format::Manifest manifest_;
  checkpoint::CheckpointFiles files_;
  std::vector<std::optional<std::size_t>> place_of_;  // by the manifest's tensor, in specs_
  std::vector<format::TensorSpec> specs_;
  std::vector<format::ManifestRange> extents_;  // that are written, by file and offset
  std::optional<format::ShardedWriter> writer_;
  // Transfers end before the writer does.
  checkpoint::TransferRing read_ring_;
  checkpoint::TransferRing write_ring_;
};

}  // namespace

Consolidated consolidate(const std::string& path, const std::string& out,
                         const ConsolidationOptions& options, io::IoEngine& io,
                         const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  const checkpoint::ChosenCheckpoint folder = checkpoint::choose_checkpoint(path);
  if (checkpoint::has_manifest(out)) {
    throw UsageError(fmt::format(
        "OUT is a training checkpoint, whose files would be lost; give another folder: path={}",
        out));
  }
  Consolidated result = Consolidation(folder.path, options, io, ledger).run(out, console);
  result.copied = copy_model_files(folder.path, out);
  result.staging = ledger->peak(memory::Tier::kHost);
  return result;
}

std::string text_of(const Consolidated& result) {
  std::string text =
      fmt::format("{}: {} of {} elements, {} in {}\n", result.out,
                  count_of(result.tensors, "tensor"), with_commas(result.elements.value),
                  to_string(result.bytes), count_of(result.files.size(), "file"));
  if (result.without_frozen)
    text += "frozen parameters were not saved with the checkpoint, and are not in it\n";
  for (const auto& [alias, name] : result.aliases)
    text += fmt::format("{} is tied to {} and is not repeated\n", format::in_quotes(alias),
                        format::in_quotes(name));
  text += result.copied.empty()
              ? "the checkpoint holds no config.json: put the model's beside the weights before "
                "transformers loads them\n"
              : fmt::format("copied with them: {}\n", format::first_ten(result.copied));
  return text;
}

nlohmann::json json_of(const Consolidated& result) {
  nlohmann::json aliases = nlohmann::json::object();
  for (const auto& [alias, name] : result.aliases) aliases[alias] = name;
  return {{"out", result.out},
          {"tensors", result.tensors},
          {"elements", result.elements.value},
          {"bytes", result.bytes.value},
          {"files", result.files},
          {"copied", result.copied},
          {"tied", aliases},
          {"without_frozen", result.without_frozen},
          {"staging_bytes", result.staging.value}};
}

}  // namespace strata::cli
