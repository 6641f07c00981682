#include "strata/checkpoint/pipeline.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::checkpoint {
namespace {

constexpr Bytes kSmallAlignment = 256_B;  // of buffers smaller than a block

Bytes stride_of(const RingOptions& options) {
  if (options.buffers <= 0 || options.buffer_bytes < 16_B)
    throw UsageError("staging needs at least one buffer of 16 bytes; got {} buffers of {} bytes",
                     options.buffers, options.buffer_bytes.value);
  const bool small = options.buffer_bytes < io::File::kDirectBlock;
  return align_up(options.buffer_bytes, small ? kSmallAlignment : io::File::kDirectBlock);
}

}  // namespace

Bytes TransferRing::room(const RingOptions& options) {
  return stride_of(options) * options.buffers;
}

TransferRing::TransferRing(const RingOptions& options, device::Device& device)
    : buffer_bytes_(options.buffer_bytes),
      stride_(stride_of(options)),
      // At once, which costs less than in parts.
      pinned_(device.allocate_host(room(options), memory::Kind::kStaging)),
      memory_(pinned_->bytes()),
      uses_(static_cast<std::size_t>(options.buffers)) {}

TransferRing::TransferRing(const RingOptions& options,
                           const std::shared_ptr<memory::Ledger>& ledger)
    : buffer_bytes_(options.buffer_bytes),
      stride_(stride_of(options)),
      pageable_(room(options), {.ledger = ledger}),
      memory_(pageable_.bytes()),
      uses_(static_cast<std::size_t>(options.buffers)) {}

TransferRing::TransferRing(std::span<std::byte> memory, Bytes buffer_bytes)
    : buffer_bytes_(buffer_bytes),
      stride_(buffer_bytes),
      memory_(memory),
      uses_((memory.size() + buffer_bytes.size() - 1) / buffer_bytes.size()) {}

TransferRing::~TransferRing() {
  abandon();
}

std::size_t TransferRing::next() {
  wait(turns_);
  return turns_++;
}

std::span<std::byte> TransferRing::buffer(std::size_t turn) {
  const std::size_t begin = turn % size() * stride_.size();
  return memory_.subspan(begin, std::min(buffer_bytes_.size(), memory_.size() - begin));
}

void TransferRing::started(std::size_t turn, std::unique_ptr<io::Transfer> transfer) {
  STRATA_ASSERT(use(turn).transfer == nullptr);
  use(turn).transfer = std::move(transfer);
}

void TransferRing::used_until(std::size_t turn, std::unique_ptr<device::Event> event) {
  use(turn).event = std::move(event);
}

void TransferRing::queue(std::size_t turn, device::Stream* stream,
                         const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    FirstError of_lost_device;  // dropped: it does no more work
    if (stream != nullptr) of_lost_device.attempt([&] { used_until(turn, stream->record()); });
    throw;
  }
  if (stream != nullptr) used_until(turn, stream->record());
}

void TransferRing::wait(std::size_t turn) {
  const std::unique_ptr<device::Event> event = std::exchange(use(turn).event, nullptr);
  const std::unique_ptr<io::Transfer> transfer = std::exchange(use(turn).transfer, nullptr);
  if (event) event->wait();
  if (transfer) transfer->wait();
}

void TransferRing::drain() {
  for (std::size_t turn = 0; turn < size(); ++turn) wait(turn);
}

void TransferRing::abandon() noexcept {
  FirstError dropped;  // the uses have ended; their errors were told or go with the ring
  for (std::size_t turn = 0; turn < size(); ++turn) dropped.attempt([&] { wait(turn); });
}

Pipeline::Pipeline(Source& source, Sink& sink, TransferRing& ring, const CopyOptions& options)
    : source_(source), sink_(sink), ring_(ring), options_(options) {
  STRATA_ASSERT(options.taking < ring.size());
}

Pipeline::~Pipeline() {
  if (!idle_) ring_.abandon();
}

void Pipeline::use(std::size_t turn, device::Stream* stream,
                   const std::function<std::unique_ptr<io::Transfer>()>& begin) {
  ring_.queue(turn, stream, [&] {
    if (auto transfer = begin()) ring_.started(turn, std::move(transfer));
  });
}

void Pipeline::begin(Piece piece) {
  const std::size_t turn = ring_.next();
  const std::span<std::byte> buffer = ring_.buffer(turn);
  piece.index = begun_++;
  STRATA_ASSERT(piece.bytes <= Bytes(buffer.size()));
  piece.content = buffer.first(piece.bytes.size());
  use(turn, source_.stream(), [&] { return source_.fill(piece, buffer); });
  filling_.push_back({piece, turn});
}

void Pipeline::reach(const format::FileOffset* next) {
  if (options_.sync_points == nullptr) return;
  const SyncPoints& points = *options_.sync_points;
  if (next == nullptr) tell_begun();
  for (; reached_ < points.places.size() && (!next || points.places[reached_] <= *next);
       ++reached_) {
    tell_begun();
    sink_.settle();  // while ranks meet
    points.reached(reached_);
  }
}

void Pipeline::tell_begun() {
  if (options_.sync_points == nullptr || std::exchange(told_begun_, true)) return;
  if (options_.sync_points->begun) options_.sync_points->begun();
}

void Pipeline::take_one() {
  const Filling filling = filling_.front();
  const Piece& piece = filling.piece;
  const format::FileOffset place = piece.place();
  reach(&place);
  filling_.pop_front();
  try {
    ring_.wait(filling.turn);
  } catch (const Error&) {
    source_.failed(piece);
    return;
  }
  source_.filled(piece);
  use(filling.turn, sink_.stream(), [&] { return sink_.take(piece); });
  tell_begun();
}

void Pipeline::pump() {
  idle_ = false;
  // As long as the ring goes round for the first time its buffers cost no wait.
  for (Piece piece; source_.next(piece); piece = {}) {
    const std::size_t ahead = begun_ < ring_.size() ? ring_.size() : ring_.size() - options_.taking;
    while (filling_.size() >= ahead) take_one();
    begin(piece);
  }
}

void Pipeline::take_all() {
  idle_ = false;
  while (!filling_.empty()) take_one();
  reach(nullptr);
  sink_.settle();
  idle_ = true;
}

void Pipeline::drain() {
  take_all();
  idle_ = false;
  ring_.drain();
  idle_ = true;
}

void copy(Source& source, Sink& sink, TransferRing& ring, const CopyOptions& options) {
  Pipeline pipeline(source, sink, ring, options);
  pipeline.pump();
  pipeline.drain();
}

}  // namespace strata::checkpoint
