#include "strata/format/safetensors_writer.h"

#include <mutex>
#include <string>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/format/range_cover.h"
#include "strata/format/safetensors_layout.h"
#include "strata/io/atomic_file.h"

namespace strata::format {

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

}  // namespace strata::format
