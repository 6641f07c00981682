#include "strata/format/sharded_writer.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <regex>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/folder_calls.h"

namespace strata::format {
namespace {

Bytes bytes_of_spec(const TensorSpec& tensor) {
  const auto numel = checked_numel(tensor.shape);
  const auto bytes = numel ? checked_bytes(*numel, tensor.dtype) : std::nullopt;
  if (!bytes)
    throw UsageError("a tensor's size does not fit 63 bits or is negative: tensor={} shape={}",
                     in_quotes(tensor.name), shape_text(tensor.shape));
  return *bytes;
}

constexpr std::string_view kIndexEnding = ".index.json";
constexpr std::string_view kSinglePickleName = "pytorch_model.bin";  // of torch.save

// Whether a reader may take a file of this name for a model's weights or their index.
bool is_weights_name(std::string_view name) {
  name = io::AtomicFile::target_of(name);
  if (is_shard_name(name)) return true;
  if (name.ends_with(kIndexEnding)) name.remove_suffix(kIndexEnding.size());
  return name == kSingleFileName || name == kSinglePickleName;
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || !std::filesystem::is_directory(folder, error))
    throw IoError("cannot make a folder: path={} {}", folder, errno_text(error.value()));
}

}  // namespace

std::optional<Span1d> RangeCover::claim(Span1d span) {
  STRATA_ASSERT(0 <= span.begin && span.begin <= span.end && span.end <= size_);
  if (span.begin == span.end) return std::nullopt;
  const auto after = parts_.upper_bound(span.begin);
  for (auto part = after == parts_.begin() ? after : std::prev(after);
       part != parts_.end() && part->first < span.end; ++part) {
    if (part->second > span.begin)
      return Span1d{std::max(part->first, span.begin), std::min(part->second, span.end)};
  }
  claimed_ += span.end - span.begin;
  parts_.emplace_hint(after, span.begin, span.end);
  return std::nullopt;
}

std::optional<Span1d> RangeCover::first_gap() const {
  std::int64_t begin = 0;
  for (const auto& [first, end] : parts_) {
    if (first != begin) return Span1d{begin, first};
    begin = end;
  }
  return begin == size_ ? std::nullopt : std::optional(Span1d{begin, size_});
}

struct ShardedWriter::File {
  File(std::string path, std::span<const TensorSpec> tensors, const Metadata& metadata,
       io::IoEngine& engine)
      : layout(lay_out_safetensors(tensors, metadata)), output(std::move(path)) {
    for (const TensorInfo& tensor : layout.tensors) covers.emplace_back(tensor.bytes.value);
    output.file().reserve(layout.file_bytes);
    engine.write(output.file(), Bytes(0), std::as_bytes(std::span(layout.head)))->wait();
  }

  // Brings the file to disk, not yet under its name.
  void seal();
  // A write has ended; `failure`: empty if it is complete.
  void ended(const std::string& failure) {
    const std::lock_guard lock(mutex);
    --in_flight;
    if (first_failure.empty()) first_failure = failure;
  }

  const SafetensorsLayout layout;
  io::AtomicFile output;
  bool sealed = false;

  std::mutex mutex;                // guards what follows
  std::vector<RangeCover> covers;  // what was handed to the engine, by tensor
  int in_flight = 0;
  std::string first_failure;
};

void ShardedWriter::File::seal() {
  const std::lock_guard lock(mutex);
  if (!first_failure.empty())
    throw IoError("a file cannot be finished since a write to it failed: {}", first_failure);
  if (in_flight != 0)
    throw UsageError(
        "a file is finished while writes to it are under way; wait for them: path={} writes={}",
        output.path(), in_flight);
  for (std::size_t i = 0; i < covers.size(); ++i) {
    const auto gap = covers[i].first_gap();
    if (!gap) continue;
    throw UsageError(
        "a file is finished before all its bytes were written: path={} tensor={} begin={} end={} "
        "written={} tensor_bytes={}",
        output.path(), in_quotes(layout.tensors[i].name), gap->begin, gap->end, covers[i].claimed(),
        covers[i].size());
  }
  output.seal();
  sealed = true;
}

// Records in the file's state how the write ended, even if no caller waits for it.
class ShardedWriter::TrackedTransfer final : public io::Transfer {
 public:
  TrackedTransfer(std::shared_ptr<File> file, std::unique_ptr<io::Transfer> transfer)
      : file_(std::move(file)), transfer_(std::move(transfer)) {}

  ~TrackedTransfer() override {
    FirstError dropped;  // the file has it; seal() reports it
    dropped.attempt([this] { wait(); });
  }

  bool done() override { return transfer_->done(); }

  void wait() override {
    try {
      transfer_->wait();
    } catch (const std::exception& error) {
      if (!std::exchange(settled_, true)) file_->ended(error.what());
      throw;
    }
    if (!std::exchange(settled_, true)) file_->ended("");
  }

 private:
  std::shared_ptr<File> file_;
  std::unique_ptr<io::Transfer> transfer_;
  bool settled_ = false;
};

ShardPlan plan_shards(std::span<const TensorSpec> tensors, Bytes shard_max) {
  if (shard_max.value < 1)
    throw UsageError("the largest size of a shard must be positive: found={}", shard_max.value);
  ShardPlan plan;
  plan.tensors.emplace_back();
  Bytes filled;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Bytes bytes = bytes_of_spec(tensors[i]);
    if (!plan.tensors.back().empty() && bytes > shard_max - filled) {
      plan.tensors.emplace_back();
      filled = Bytes(0);
    }
    plan.tensors.back().push_back(i);
    filled += bytes;
    if (__builtin_add_overflow(plan.total.value, bytes.value, &plan.total.value))
      throw UsageError("the tensors' bytes together do not fit 63 bits");
  }
  const std::size_t count = plan.tensors.size();
  for (std::size_t i = 0; i < count; ++i)
    plan.files.push_back(count == 1
                             ? std::string(kSingleFileName)
                             : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count));
  return plan;
}

bool is_shard_name(std::string_view file_name) {
  static const std::regex shard(
      "model-[0-9]{5,}-of-[0-9]{5,}[.]safetensors|pytorch_model-[0-9]{5,}-of-[0-9]{5,}[.]bin");
  return std::regex_match(file_name.begin(), file_name.end(), shard);
}

void remove_other_weights(const std::string& folder, const std::set<std::string>& ours) {
  std::vector<std::string> others;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (is_weights_name(name) && !ours.contains(name)) others.push_back(name);
  }
  if (error) throw IoError("cannot list a folder: path={} {}", folder, errno_text(error.value()));
  std::partition(others.begin(), others.end(),
                 [](const std::string& n) { return n.ends_with(kIndexEnding); });
  for (const std::string& name : others) io::remove_file(folder + "/" + name);
}

ShardedWriter::ShardedWriter(std::string folder, std::vector<TensorSpec> tensors,
                             io::IoEngine& engine, const ShardedWriterOptions& options)
    : folder_(std::move(folder)),
      tensors_(std::move(tensors)),
      engine_(engine),
      plan_(plan_shards(tensors_, options.shard_max)),
      places_(tensors_.size()) {
  std::set<std::string_view> names;
  for (const TensorSpec& tensor : tensors_) {
    if (!names.insert(tensor.name).second)
      throw UsageError("a checkpoint cannot hold two tensors of one name: tensor={}", tensor.name);
  }
  make_folder(folder_);
  for (std::size_t file = 0; file < plan_.files.size(); ++file) {
    std::vector<TensorSpec> members;
    for (const std::size_t tensor : plan_.tensors[file]) {
      places_[tensor] = Place{file, members.size()};
      members.push_back(tensors_[tensor]);
    }
    files_.push_back(
        std::make_shared<File>(in_folder(plan_.files[file]), members, options.metadata, engine_));
  }
}

ShardedWriter::~ShardedWriter() = default;

std::unique_ptr<io::Transfer> ShardedWriter::write(std::size_t tensor, Bytes offset,
                                                   std::span<const std::byte> source) {
  STRATA_ASSERT(tensor < places_.size());
  const Place& place = places_[tensor];
  const std::shared_ptr<File>& file = files_[place.file];
  STRATA_ASSERT(!file->sealed);
  const TensorInfo& info = file->layout.tensors[place.index];
  const Bytes bytes(source.size());
  if (offset.value < 0 || offset > info.bytes || bytes > info.bytes - offset)
    throw UsageError(
        "a write does not fit its tensor: path={} tensor={} offset={} bytes={} tensor_bytes={}",
        file->output.path(), in_quotes(info.name), offset.value, bytes.value, info.bytes.value);
  {
    const std::lock_guard lock(file->mutex);
    const auto twice = file->covers[place.index].claim({offset.value, (offset + bytes).value});
    if (twice)
      throw UsageError("bytes of a tensor are written twice: path={} tensor={} begin={} end={}",
                       file->output.path(), in_quotes(info.name), twice->begin, twice->end);
    ++file->in_flight;
  }
  try {
    return std::make_unique<TrackedTransfer>(
        file, engine_.write(file->output.file(), info.offset + offset, source));
  } catch (const std::exception& error) {
    file->ended(error.what());
    throw;
  }
}

void ShardedWriter::finish() {
  for (const auto& file : files_) file->seal();
  const bool overwrites = std::ranges::any_of(plan_.files, [this](const std::string& name) {
    return std::filesystem::exists(in_folder(name));
  });
  if (plan_.sharded() && overwrites) io::remove_file(in_folder(kIndexFileName));
  for (const auto& file : files_) file->output.publish();
  // A model.safetensors beside an index would be loaded in its place: removing others is part of
  // it.
  std::set<std::string> ours(plan_.files.begin(), plan_.files.end());
  if (plan_.sharded()) {
    io::write_file_atomically(in_folder(kIndexFileName), index_text());
    ours.insert(kIndexFileName);
  }
  remove_other_weights(folder_, ours);
}

std::string ShardedWriter::index_text() const {
  nlohmann::json index;
  index["metadata"]["total_size"] = plan_.total.value;
  for (std::size_t i = 0; i < tensors_.size(); ++i)
    index["weight_map"][tensors_[i].name] = plan_.files[places_[i].file];
  return index.dump(2) + "\n";
}

}  // namespace strata::format
