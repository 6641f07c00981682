#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <span>
#include <system_error>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/cli/commands.h"
#include "strata/format/safetensors.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"
#include "strata/kernels/elementwise.h"
#include "strata/plan/param_spec.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

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
  if (error) throw IoError("cannot list a folder: path={} {}", from, errno_text(error.value()));
  std::ranges::sort(names);
  for (const std::string& name : names)
    copy_whole((fs::path(from) / name).string(), (fs::path(to) / name).string());
  return names;
}

// Writes the tensors of the model: casts the elements of extents, and writes them to where their
// tensors lie. Borrows all that it is made of.
class ModelWriter {
 public:
  ModelWriter(const format::Manifest& manifest, const std::string& folder,
              const ConsolidationRequest& request, io::IoEngine& io,
              const std::shared_ptr<memory::Ledger>& ledger)
      : manifest_(manifest), place_of_(manifest.tensors.size()), ring_(request.ring, ledger) {
    for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
      const format::ManifestTensor& tensor = manifest.tensors[t];
      if (tensor.role != format::TensorRole::kParameter &&
          tensor.role != format::TensorRole::kBuffer)
        continue;
      place_of_[t] = specs_.size();
      const bool cast = request.dtype && is_floating(tensor.dtype);
      specs_.push_back({tensor.name, cast ? *request.dtype : tensor.dtype, tensor.shape});
    }
    for (const format::ManifestRange& extent : manifest.extents) {
      if (extent.kind != 0 || !place_of_[extent.tensor]) continue;
      const format::TensorSpec& spec = specs_[*place_of_[extent.tensor]];
      if (extent.dtype != spec.dtype && !(is_floating(extent.dtype) && is_floating(spec.dtype)))
        throw FormatError(
            "a tensor of a checkpoint is stored in a dtype that cannot become its own: tensor={} "
            "stored as={} wanted={} path={}",
            format::in_quotes(spec.name), name_of(extent.dtype), name_of(spec.dtype), folder);
      extents_.push_back(extent);
    }
    writer_.emplace(request.out, specs_, io, format::ShardedWriterOptions{request.shard_max});
  }

  const std::vector<format::TensorSpec>& specs() const { return specs_; }
  // That are read: by file and offset.
  const std::vector<format::ManifestRange>& extents() const { return extents_; }
  const format::ShardPlan& shards() const { return writer_->plan(); }

  // Elements of extents()[extent], from its byte `at` on.
  void take(std::size_t extent, Bytes at, std::span<const std::byte> bytes) {
    const format::ManifestRange& e = extents_[extent];
    if (manifest_.tensors[e.tensor].channels_last)
      collect(e, at, bytes);
    else
      give(e, e.begin + Numel(at / size_of(e.dtype)), bytes);
  }
  void finish() {
    ring_.drain();
    writer_->finish();
  }

 private:
  // Writes a channels_last tensor, in the order of its dimensions, once it has all elements.
  void collect(const format::ManifestRange& extent, Bytes at, std::span<const std::byte> bytes) {
    const std::vector<std::int64_t>& shape = manifest_.tensors[extent.tensor].shape;
    auto& [whole, filled] = collected_[extent.tensor];
    whole.resize(bytes_of(*format::checked_numel(shape), extent.dtype).size());
    std::ranges::copy(bytes, whole.begin() + (bytes_of(extent.begin, extent.dtype) + at).value);
    filled += bytes.size();
    if (filled < whole.size()) return;
    plan::reorder(whole, shape, size_of(extent.dtype), /*channels_last=*/false);
    give(extent, Numel(), whole);
    collected_.erase(extent.tensor);
  }

  // Writes elements of the extent's tensor, of the extent's dtype, from `first` on.
  void give(const format::ManifestRange& extent, Numel first, std::span<const std::byte> bytes) {
    const DType stored = extent.dtype;
    const std::size_t tensor = *place_of_[extent.tensor];
    const DType dtype = specs_[tensor].dtype;
    const Numel end = first + Numel(Bytes(bytes.size()) / size_of(stored));
    while (first < end) {
      const Numel count = std::min(Numel(ring_.buffer_bytes() / size_of(dtype)), end - first);
      const auto source = bytes.first(bytes_of(count, stored).size());
      const std::size_t turn = ring_.next();
      const auto target = ring_.buffer(turn).first(bytes_of(count, dtype).size());
      if (dtype == stored)
        std::ranges::copy(source, target.begin());
      else
        kernels::cast(target.data(), dtype, source.data(), stored, count, nullptr);
      ring_.started(turn, writer_->write(tensor, bytes_of(first, dtype), target));
      bytes = bytes.subspan(source.size());
      first += count;
    }
  }

  const format::Manifest& manifest_;
  std::vector<std::optional<std::size_t>> place_of_;  // by the manifest's tensor, in specs_
  std::vector<format::TensorSpec> specs_;
  std::vector<format::ManifestRange> extents_;
  std::optional<format::ShardedWriter> writer_;
  checkpoint::TransferRing ring_;  // transfers end before the writer does
  // By the manifest's tensor: its bytes, and how many are there.
  std::map<std::size_t, std::pair<std::vector<std::byte>, std::size_t>> collected_;
};

Report report_of(const format::Manifest& manifest, const ModelWriter& writer,
                 const std::string& out, const std::vector<std::string>& copied) {
  const format::ShardPlan& shards = writer.shards();
  Numel elements;
  for (const format::TensorSpec& spec : writer.specs())
    elements += *format::checked_numel(spec.shape);
  const bool without_frozen =
      nlohmann::json::parse(manifest.training).value("without_frozen", nlohmann::json()) == true;
  std::string text = fmt::format(
      "{}: {} of {} elements, {} in {}\n", out, count_of(writer.specs().size(), "tensor"),
      with_commas(elements.value), to_string(shards.total), count_of(shards.files.size(), "file"));
  if (without_frozen)
    text += "frozen parameters were not saved with the checkpoint, and are not in it\n";
  nlohmann::json tied = nlohmann::json::object();
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    for (const std::string& alias : tensor.aliases) {
      tied[alias] = tensor.name;
      text += fmt::format("{} is tied to {} and is not repeated\n", format::in_quotes(alias),
                          format::in_quotes(tensor.name));
    }
  }
  text += copied.empty()
              ? "the checkpoint holds no config.json: put the model's beside the weights before "
                "transformers loads them\n"
              : fmt::format("copied with them: {}\n", format::first_ten(copied));
  return {{{"out", out},
           {"tensors", writer.specs().size()},
           {"elements", elements.value},
           {"bytes", shards.total.value},
           {"files", shards.files},
           {"copied", copied},
           {"tied", tied},
           {"without_frozen", without_frozen}},
          text};
}

}  // namespace

Report consolidate(const ConsolidationRequest& request,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console) {
  const std::string folder = checkpoint::choose_checkpoint(request.path).path;
  if (checkpoint::has_manifest(request.out))
    throw UsageError(
        "OUT is a training checkpoint, whose files would be lost; give another folder: path={}",
        request.out);
  const format::Manifest manifest = format::read_manifest(folder);
  const checkpoint::CheckpointFiles files(folder, manifest);
  io::ThreadEngine io;
  ModelWriter writer(manifest, folder, request, io, ledger);
  const checkpoint::Verification verify{
      manifest.files, request.verify, [&](const checkpoint::WrongRange& wrong) {
        throw FormatError(
            "a checkpoint is damaged, and nothing was written: {}; `strata inspect --verify` lists "
            "all that is wrong: path={}",
            text_of(manifest, wrong), folder);
      }};
  std::vector<checkpoint::FileRange> ranges;
  Bytes total;
  for (const format::ManifestRange& extent : writer.extents()) {
    ranges.push_back({extent.file, extent.offset, checkpoint::end_of(extent) - extent.offset});
    total += ranges.back().bytes;
  }
  // Also without checksums: a gap costs less than a jump.
  ranges = checkpoint::whole_blocks(ranges, manifest.files);
  {
    Progress progress("consolidating", total, console);
    const std::vector<checkpoint::ReadableFile> ways = files.readable();
    checkpoint::TransferRing ring(request.ring, ledger);
    checkpoint::RangeSource source(ways, ranges, io, ring.buffer_bytes(),
                                   {.aligned = 16_B, .verify = &verify});
    checkpoint::ExtentSink sink(writer.extents(), [&](std::size_t extent, Bytes at, auto bytes) {
      progress.add(Bytes(bytes.size()));
      writer.take(extent, at, bytes);
    });
    copy(source, sink, ring);
  }
  writer.finish();
  const std::vector<std::string> copied = copy_model_files(folder, request.out);
  Report report = report_of(manifest, writer, request.out, copied);
  report.json["staging_bytes"] = ledger->peak(memory::Tier::kHost).value;
  return report;
}

}  // namespace strata::cli
