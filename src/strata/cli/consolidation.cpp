#include "strata/cli/consolidation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "strata/base/error.h"
#include "strata/cli/checked_read.h"
#include "strata/cli/chosen_checkpoint.h"
#include "strata/cli/file_check.h"
#include "strata/cli/model_files.h"
#include "strata/cli/text_table.h"
#include "strata/format/message_text.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

// Without checksums: what lies between two extents is read, too, where that is cheaper than a jump.
constexpr Bytes kGapRead = 64_KiB;

DType dtype_in(const format::ManifestTensor& tensor, const ConsolidationOptions& options) {
  return options.dtype && is_floating(tensor.dtype) ? *options.dtype : tensor.dtype;
}

class Consolidation {
 public:
  Consolidation(const std::string& folder, const ConsolidationOptions& options, io::IoEngine& io,
                const std::shared_ptr<memory::Ledger>& ledger)
      : folder_(folder),
        options_(options),
        io_(io),
        manifest_(format::read_manifest(folder)),
        files_(open_checkpoint_files(folder, manifest_)),
        read_ring_(options.ring, ledger),
        write_ring_(options.ring, ledger) {
    place_of_.resize(manifest_.tensors.size());
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t) choose(t);
    for (const format::ManifestExtent& extent : manifest_.extents) {
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
    write_ring_.drain();
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

  void check_cast(const format::ManifestExtent& extent) const {
    const format::TensorSpec& spec = specs_[*place_of_[extent.tensor]];
    const bool fits =
        extent.dtype == spec.dtype || (is_floating(extent.dtype) && is_floating(spec.dtype));
    if (fits) return;
    throw FormatError(fmt::format(
        "a tensor of a checkpoint is stored in a dtype that cannot become its own: "
        "tensor={} stored as={} wanted={} path={}",
        format::in_quotes(spec.name), name_of(extent.dtype), name_of(spec.dtype), folder_));
  }

  std::vector<io::FileRange> ranges() const {
    std::vector<io::FileRange> result;
    for (const format::ManifestExtent& extent : extents_) {
      const Bytes end = extent.offset + bytes_of(extent.end - extent.begin, extent.dtype);
      const bool near = !result.empty() && result.back().file == extent.file &&
                        result.back().offset + result.back().bytes + kGapRead >= extent.offset;
      if (near) {
        result.back().bytes = end - result.back().offset;
      } else {
        result.push_back({extent.file, extent.offset, end - extent.offset});
      }
    }
    return options_.verify ? whole_blocks(result, manifest_.files) : result;
  }

  void stream(Console& console) {
    const std::vector<io::FileRange> wanted = ranges();
    Bytes total;
    for (const io::FileRange& range : wanted) total += range.bytes;
    Progress progress("consolidating", total, console);
    CheckedReading reading;
    for (const io::File& file : files_) reading.files.push_back(&file);
    reading.sums = manifest_.files;
    reading.ranges = wanted;
    reading.verify = options_.verify;
    reading.take = [&](std::size_t file, Bytes offset, std::span<const std::byte> bytes) {
      take(file, offset, bytes);
      progress.add(Bytes(bytes.size()));
    };
    reading.wrong = [&](const WrongRange& wrong) { fail(wrong); };
    read_checked(reading, io_, read_ring_);
  }

  [[noreturn]] void fail(const WrongRange& wrong) const {
    const Finding finding{manifest_.files[wrong.file].name, ByteRange{wrong.begin, wrong.end},
                          owners_of(manifest_, wrong.file, {wrong.begin, wrong.end}),
                          wrong.problem};
    throw FormatError(
        fmt::format("a checkpoint is damaged, and nothing was written: {}; `strata inspect "
                    "--verify` lists all that is wrong: path={}",
                    text_of(finding), folder_));
  }

  // The extents of a piece. Pieces come in order, and end between elements.
  void take(std::size_t file, Bytes offset, std::span<const std::byte> bytes) {
    const Bytes stop = offset + Bytes(bytes.size());
    for (; next_ < extents_.size(); ++next_) {
      const format::ManifestExtent& extent = extents_[next_];
      const Bytes end = extent.offset + bytes_of(extent.end - extent.begin, extent.dtype);
      if (extent.file != file || extent.offset >= stop) return;
      const Bytes from = std::max(extent.offset, offset);
      const Bytes to = std::min(end, stop);
      const Bytes size = size_of(extent.dtype);
      write(extent, extent.begin + Numel((from - extent.offset) / size),
            bytes.subspan((from - offset).size(), (to - from).size()));
      if (end > stop) return;
    }
  }

  void write(const format::ManifestExtent& extent, Numel first, std::span<const std::byte> source) {
    const std::size_t tensor = *place_of_[extent.tensor];
    const DType dtype = specs_[tensor].dtype;
    const std::int64_t most = write_ring_.buffer_bytes() / size_of(dtype);
    std::int64_t left = Bytes(source.size()) / size_of(extent.dtype);
    while (left > 0) {
      const Numel count(std::min(left, most));
      const auto target = write_ring_.buffer(turn_).first(bytes_of(count, dtype).size());
      copy(target, dtype, source, extent.dtype, count);
      write_ring_.started(turn_++, writer_->write(tensor, bytes_of(first, dtype), target));
      source = source.subspan(bytes_of(count, extent.dtype).size());
      first += count;
      left -= count.value;
    }
  }

  static void copy(std::span<std::byte> target, DType target_dtype,
                   std::span<const std::byte> source, DType source_dtype, Numel count) {
    if (target_dtype == source_dtype) {
      std::ranges::copy(source.first(target.size()), target.begin());
    } else {
      kernels::cast(target.data(), target_dtype, source.data(), source_dtype, count, nullptr);
    }
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
  std::vector<io::File> files_;
  std::vector<std::optional<std::size_t>> place_of_;  // by the manifest's tensor, in specs_
  std::vector<format::TensorSpec> specs_;
  std::vector<format::ManifestExtent> extents_;  // that are written, by file and offset
  std::size_t next_ = 0;                         // of extents_
  std::optional<format::ShardedWriter> writer_;
  // Transfers end before the writer does.
  BufferRing read_ring_;
  BufferRing write_ring_;
  std::size_t turn_ = 0;  // of write_ring_
};

}  // namespace

Consolidated consolidate(const std::string& path, const std::string& out,
                         const ConsolidationOptions& options, io::IoEngine& io,
                         const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  const ChosenCheckpoint folder = choose_checkpoint(path);
  if (has_manifest(out)) {
    throw UsageError(
        fmt::format("OUT is a training checkpoint, whose files would be lost; give another folder: "
                    "path={}",
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
