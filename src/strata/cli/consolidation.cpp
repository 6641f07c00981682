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

// Without checksums: what lies between two extents is read, too, where that is cheaper than a jump.
constexpr Bytes kGapRead = 64_KiB;

// The tensors that are written, and where their elements lie.
struct Plan {
  Plan(const format::Manifest& manifest, const ConsolidationRequest& request,
       const std::string& folder)
      : place_of(manifest.tensors.size()) {
    for (std::size_t t = 0; t < manifest.tensors.size(); ++t) {
      const format::ManifestTensor& tensor = manifest.tensors[t];
      if (tensor.role != format::TensorRole::kParameter &&
          tensor.role != format::TensorRole::kBuffer)
        continue;
      place_of[t] = specs.size();
      const bool cast = request.dtype && is_floating(tensor.dtype);
      specs.push_back({tensor.name, cast ? *request.dtype : tensor.dtype, tensor.shape});
    }
    for (const format::ManifestRange& extent : manifest.extents) {
      if (extent.kind != 0 || !place_of[extent.tensor]) continue;
      const format::TensorSpec& spec = specs[*place_of[extent.tensor]];
      if (extent.dtype != spec.dtype && !(is_floating(extent.dtype) && is_floating(spec.dtype)))
        throw FormatError(
            "a tensor of a checkpoint is stored in a dtype that cannot become its own: tensor={} "
            "stored as={} wanted={} path={}",
            format::in_quotes(spec.name), name_of(extent.dtype), name_of(spec.dtype), folder);
      extents.push_back(extent);
    }
  }

  // The ranges of the files that are read.
  std::vector<checkpoint::FileRange> ranges() const {
    std::vector<checkpoint::FileRange> result;
    for (const format::ManifestRange& extent : extents) {
      const Bytes end = checkpoint::end_of(extent);
      const bool near = !result.empty() && result.back().file == extent.file &&
                        result.back().offset + result.back().bytes + kGapRead >= extent.offset;
      if (near)
        result.back().bytes = end - result.back().offset;
      else
        result.push_back({extent.file, extent.offset, end - extent.offset});
    }
    return result;
  }

  std::vector<std::optional<std::size_t>> place_of;  // by the manifest's tensor, in specs
  std::vector<format::TensorSpec> specs;
  std::vector<format::ManifestRange> extents;  // by file and offset
};

// Casts the elements of extents and writes them to where their tensors lie.
class CastWriter final : public checkpoint::ExtentSink {
 public:
  CastWriter(const format::Manifest& manifest, const Plan& plan, format::ShardedWriter& writer,
             checkpoint::TransferRing& ring, Progress& progress)
      : ExtentSink(plan.extents, [this](auto... elements) { take_elements(elements...); }),
        manifest_(manifest),
        plan_(plan),
        writer_(writer),
        ring_(ring),
        progress_(progress) {}

  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    progress_.add(piece.bytes);
    return ExtentSink::take(piece);
  }
  void settle() override { ring_.drain(); }

 private:
  void take_elements(std::size_t extent, Bytes at, std::span<const std::byte> bytes) {
    const format::ManifestRange& e = plan_.extents[extent];
    if (manifest_.tensors[e.tensor].channels_last)
      collect(e, at, bytes);
    else
      give(e, e.begin + Numel(at / size_of(e.dtype)), bytes);
  }

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
    const std::size_t tensor = *plan_.place_of[extent.tensor];
    const DType dtype = plan_.specs[tensor].dtype;
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
      ring_.started(turn, writer_.write(tensor, bytes_of(first, dtype), target));
      bytes = bytes.subspan(source.size());
      first += count;
    }
  }

  const format::Manifest& manifest_;
  const Plan& plan_;
  format::ShardedWriter& writer_;
  checkpoint::TransferRing& ring_;
  Progress& progress_;
  // By the manifest's tensor: its bytes, and how many are there.
  std::map<std::size_t, std::pair<std::vector<std::byte>, std::size_t>> collected_;
};

Report report_of(const format::Manifest& manifest, const Plan& plan,
                 const format::ShardPlan& shards, const std::string& out,
                 const std::vector<std::string>& copied) {
  Numel elements;
  for (const format::TensorSpec& spec : plan.specs) elements += *format::checked_numel(spec.shape);
  const bool without_frozen =
      nlohmann::json::parse(manifest.training).value("without_frozen", nlohmann::json()) == true;
  std::string text = fmt::format("{}: {} of {} elements, {} in {}\n", out,
                                 count_of(plan.specs.size(), "tensor"), with_commas(elements.value),
                                 to_string(shards.total), count_of(shards.files.size(), "file"));
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
           {"tensors", plan.specs.size()},
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
  std::optional<format::ShardedWriter> writer;
  // Transfers end before the writer does.
  checkpoint::TransferRing read_ring(request.ring, ledger);
  checkpoint::TransferRing write_ring(request.ring, ledger);
  const Plan plan(manifest, request, folder);
  writer.emplace(request.out, plan.specs, io, format::ShardedWriterOptions{request.shard_max});
  const checkpoint::Verification verify{
      manifest.files, request.verify, [&](const checkpoint::WrongRange& wrong) {
        throw FormatError(
            "a checkpoint is damaged, and nothing was written: {}; `strata inspect --verify` lists "
            "all that is wrong: path={}",
            text_of(manifest, wrong), folder);
      }};
  const std::vector<checkpoint::FileRange> ranges =
      request.verify ? checkpoint::whole_blocks(plan.ranges(), manifest.files) : plan.ranges();
  Bytes total;
  for (const checkpoint::FileRange& range : ranges) total += range.bytes;
  {
    Progress progress("consolidating", total, console);
    const std::vector<checkpoint::ReadableFile> ways = files.readable();
    checkpoint::RangeSource source(ways, ranges, io, read_ring.buffer_bytes(),
                                   {.aligned = 16_B, .verify = &verify});
    CastWriter sink(manifest, plan, *writer, write_ring, progress);
    copy(source, sink, read_ring);
  }
  writer->finish();
  const std::vector<std::string> copied = copy_model_files(folder, request.out);
  Report report = report_of(manifest, plan, writer->plan(), request.out, copied);
  report.json["staging_bytes"] = ledger->peak(memory::Tier::kHost).value;
  return report;
}

}  // namespace strata::cli
