#include "strata/checkpoint/pipeline.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::checkpoint {
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
