#include "strata/format/sharded_writer.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/format/safetensors.h"
#include "strata/io/folder_calls.h"

namespace strata::format {
namespace {

Bytes bytes_of_spec(const TensorSpec& tensor) {
  const auto numel = checked_numel(tensor.shape);
  const auto bytes = numel ? checked_bytes(*numel, tensor.dtype) : std::nullopt;
  if (!bytes) {
    throw UsageError(
        fmt::format("a tensor's size does not fit 63 bits or is negative: tensor={} shape={}",
                    in_quotes(tensor.name), shape_text(tensor.shape)));
  }
  return *bytes;
}

// Cuts a prefix off; false if it is not there.
bool take(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

bool take_number(std::string_view& text) {
  const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(digits);
  return digits >= 5;
}

constexpr std::string_view kIndexEnding = ".index.json";

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || !std::filesystem::is_directory(folder, error)) {
    throw IoError(
        fmt::format("cannot make a folder: path={} {}", folder, errno_text(error.value())));
  }
}

}  // namespace

std::optional<Span1d> RangeCover::claim(Span1d span) {
  STRATA_ASSERT(0 <= span.begin && span.begin <= span.end && span.end <= size_);
  if (span.begin == span.end) return std::nullopt;
  auto after = parts_.upper_bound(span.begin);
  if (after != parts_.begin()) {
    const auto before = std::prev(after);
    if (before->second > span.begin) {
      return Span1d{span.begin, std::min(before->second, span.end)};
    }
  }
  if (after != parts_.end() && after->first < span.end) {
    return Span1d{after->first, std::min(after->second, span.end)};
  }
  claimed_ += span.end - span.begin;
  if (after != parts_.end() && after->first == span.end) {
    span.end = after->second;
    after = parts_.erase(after);
  }
  if (after != parts_.begin() && std::prev(after)->second == span.begin) {
    std::prev(after)->second = span.end;
  } else {
    parts_.emplace_hint(after, span.begin, span.end);
  }
  return std::nullopt;
}

std::optional<Span1d> RangeCover::first_gap() const {
  if (complete()) return std::nullopt;
  const auto first = parts_.begin();
  if (first == parts_.end()) return Span1d{0, size_};
  if (first->first > 0) return Span1d{0, first->first};
  const auto second = std::next(first);
  return Span1d{first->second, second == parts_.end() ? size_ : second->first};
}

struct SafetensorsWriter::State {
  State(std::string path, SafetensorsLayout the_layout, io::IoEngine& the_engine)
      : engine(&the_engine), layout(std::move(the_layout)), output(std::move(path)) {
    covers.reserve(layout.tensors.size());
    for (const TensorInfo& tensor : layout.tensors) covers.emplace_back(tensor.bytes.value);
  }

  io::IoEngine* engine;
  const SafetensorsLayout layout;
  io::AtomicFile output;
  bool sealed = false;

  std::mutex mutex;                // guards what follows
  std::vector<RangeCover> covers;  // what was handed to the engine, by tensor
  int in_flight = 0;
  std::string first_failure;
};

// Records in the writer's state how the write ended, even if no caller waits for it.
class SafetensorsWriter::TrackedTransfer final : public io::Transfer {
 public:
  TrackedTransfer(std::shared_ptr<State> state, std::unique_ptr<io::Transfer> transfer)
      : state_(std::move(state)), transfer_(std::move(transfer)) {}

  ~TrackedTransfer() override {
    try {
      wait();
    } catch (...) {
      // The state has it; seal() reports it.
    }
  }

  bool done() override { return transfer_->done(); }

  void wait() override {
    try {
      transfer_->wait();
    } catch (const std::exception& error) {
      settle(error.what());
      throw;
    }
    settle("");
  }

 private:
  void settle(const char* failure) {
    if (std::exchange(settled_, true)) return;
    const std::lock_guard lock(state_->mutex);
    --state_->in_flight;
    if (state_->first_failure.empty()) state_->first_failure = failure;
  }

  std::shared_ptr<State> state_;
  std::unique_ptr<io::Transfer> transfer_;
  bool settled_ = false;
};

SafetensorsWriter::SafetensorsWriter(std::string path, std::span<const TensorSpec> tensors,
                                     const Metadata& metadata, io::IoEngine& engine)
    : state_(std::make_shared<State>(std::move(path), lay_out_safetensors(tensors, metadata),
                                     engine)) {
  state_->output.file().reserve(state_->layout.file_bytes);
  engine.write(state_->output.file(), Bytes(0), std::as_bytes(std::span(state_->layout.head)))
      ->wait();
}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;

const std::string& SafetensorsWriter::path() const {
  return state_->output.path();
}

const std::vector<TensorInfo>& SafetensorsWriter::tensors() const {
  return state_->layout.tensors;
}

std::unique_ptr<io::Transfer> SafetensorsWriter::write(std::size_t tensor, Bytes offset,
                                                       std::span<const std::byte> source) {
  State& state = *state_;
  STRATA_ASSERT(tensor < state.layout.tensors.size() && !state.sealed);
  const TensorInfo& info = state.layout.tensors[tensor];
  const Bytes bytes(source.size());
  if (offset.value < 0 || offset > info.bytes || bytes > info.bytes - offset) {
    throw UsageError(fmt::format(
        "a write does not fit its tensor: path={} tensor={} offset={} bytes={} tensor_bytes={}",
        path(), in_quotes(info.name), offset.value, bytes.value, info.bytes.value));
  }
  {
    const std::lock_guard lock(state.mutex);
    const auto twice = state.covers[tensor].claim(Span1d{offset.value, (offset + bytes).value});
    if (twice) {
      throw UsageError(
          fmt::format("bytes of a tensor are written twice: path={} tensor={} begin={} end={}",
                      path(), in_quotes(info.name), twice->begin, twice->end));
    }
    ++state.in_flight;
  }
  std::unique_ptr<io::Transfer> transfer;
  try {
    transfer = state.engine->write(state.output.file(), info.offset + offset, source);
  } catch (const std::exception& error) {
    const std::lock_guard lock(state.mutex);
    --state.in_flight;
    if (state.first_failure.empty()) state.first_failure = error.what();
    throw;
  }
  return std::make_unique<TrackedTransfer>(state_, std::move(transfer));
}

void SafetensorsWriter::seal() {
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    if (!state.first_failure.empty()) {
      throw IoError(fmt::format("a file cannot be finished since a write to it failed: {}",
                                state.first_failure));
    }
    if (state.in_flight != 0) {
      throw UsageError(fmt::format(
          "a file is finished while writes to it are under way; wait for them: path={} writes={}",
          path(), state.in_flight));
    }
    for (std::size_t i = 0; i < state.covers.size(); ++i) {
      const auto gap = state.covers[i].first_gap();
      if (!gap) continue;
      throw UsageError(fmt::format(
          "a file is finished before all its bytes were written: path={} tensor={} begin={} end={} "
          "written={} tensor_bytes={}",
          path(), in_quotes(state.layout.tensors[i].name), gap->begin, gap->end,
          state.covers[i].claimed(), state.covers[i].size()));
    }
  }
  state.output.seal();
  state.sealed = true;
}

void SafetensorsWriter::publish() {
  STRATA_ASSERT(state_->sealed);
  state_->output.publish();
}

ShardPlan plan_shards(std::span<const TensorSpec> tensors, Bytes shard_max) {
  if (shard_max.value < 1) {
    throw UsageError(
        fmt::format("the largest size of a shard must be positive: found={}", shard_max.value));
  }
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
    if (__builtin_add_overflow(plan.total.value, bytes.value, &plan.total.value)) {
      throw UsageError("the tensors' bytes together do not fit 63 bits");
    }
  }
  const std::size_t count = plan.tensors.size();
  for (std::size_t i = 0; i < count; ++i) {
    plan.files.push_back(count == 1
                             ? std::string(kSingleFileName)
                             : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count));
  }
  return plan;
}

bool is_shard_name(std::string_view file_name) {
  const bool pickle = take(file_name, "pytorch_");
  return take(file_name, "model-") && take_number(file_name) && take(file_name, "-of-") &&
         take_number(file_name) && file_name == (pickle ? ".bin" : ".safetensors");
}

bool is_weights_name(std::string_view name) {
  name = io::AtomicFile::target_of(name);
  if (is_shard_name(name)) return true;
  if (name.ends_with(kIndexEnding)) name.remove_suffix(kIndexEnding.size());
  return name == kSingleFileName || name == kSinglePickleName;
}

void remove_other_weights(const std::string& folder, const std::set<std::string>& ours) {
  std::vector<std::string> others;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (is_weights_name(name) && !ours.contains(name)) others.push_back(name);
  }
  if (error) {
    throw IoError(
        fmt::format("cannot list a folder: path={} {}", folder, errno_text(error.value())));
  }
  std::partition(others.begin(), others.end(),
                 [](const std::string& n) { return n.ends_with(kIndexEnding); });
  for (const std::string& name : others) io::remove_file(folder + "/" + name);
}

ShardedWriter::ShardedWriter(std::string folder, std::vector<TensorSpec> tensors,
                             io::IoEngine& engine, const ShardedWriterOptions& options)
    : folder_(std::move(folder)),
      tensors_(std::move(tensors)),
      plan_(plan_shards(tensors_, options.shard_max)),
      places_(tensors_.size()) {
  std::set<std::string_view> names;
  for (const TensorSpec& tensor : tensors_) {
    if (!names.insert(tensor.name).second) {
      throw UsageError(
          fmt::format("a checkpoint cannot hold two tensors of one name: tensor={}", tensor.name));
    }
  }
  make_folder(folder_);
  for (std::size_t file = 0; file < plan_.files.size(); ++file) {
    std::vector<TensorSpec> members;
    for (const std::size_t tensor : plan_.tensors[file]) {
      places_[tensor] = Place{file, members.size()};
      members.push_back(tensors_[tensor]);
    }
    writers_.emplace_back(in_folder(plan_.files[file]), members, options.metadata, engine);
  }
}

std::unique_ptr<io::Transfer> ShardedWriter::write(std::size_t tensor, Bytes offset,
                                                   std::span<const std::byte> source) {
  STRATA_ASSERT(tensor < places_.size());
  const Place& place = places_[tensor];
  return writers_[place.file].write(place.index, offset, source);
}

void ShardedWriter::finish() {
  for (SafetensorsWriter& writer : writers_) writer.seal();
  retire_index_of_overwritten_shards();
  for (SafetensorsWriter& writer : writers_) writer.publish();
  if (plan_.sharded()) publish_index();
  remove_leftovers();
}

void ShardedWriter::retire_index_of_overwritten_shards() const {
  if (!plan_.sharded()) return;
  const bool overwrites = std::any_of(
      plan_.files.begin(), plan_.files.end(),
      [this](const std::string& name) { return std::filesystem::exists(in_folder(name)); });
  if (overwrites) io::remove_file(in_folder(kIndexFileName));
}

void ShardedWriter::publish_index() const {
  nlohmann::json index;
  index["metadata"]["total_size"] = plan_.total.value;
  nlohmann::json& map = index["weight_map"];
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    map[tensors_[i].name] = plan_.files[places_[i].file];
  }
  io::write_file_atomically(in_folder(kIndexFileName), index.dump(2) + "\n");
}

// A model.safetensors beside an index would be loaded in its place, so this is part of the save.
void ShardedWriter::remove_leftovers() const {
  std::set<std::string> ours(plan_.files.begin(), plan_.files.end());
  if (plan_.sharded()) ours.insert(kIndexFileName);
  remove_other_weights(folder_, ours);
}

}  // namespace strata::format
