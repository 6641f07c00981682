#include "strata/comm/peer_reduction.h"

#include <fmt/format.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/comm/bulk_operation.h"

namespace strata::comm {

using Kind = PeerFlags::Kind;

std::unique_ptr<device::Event> PeerReductions::start(const Reduction& reduction,
                                                     std::string_view tag, WorkTimes* times) {
  const BulkOperation reduce = describe_reduction(reduction, link_.world_size(), tag);
  if (!link_.buffers()->number_of(*reduction.source)) {
    throw UsageError(
        fmt::format("the source of a reduce_scatter must be allocated by the same "
                    "collectives ('{}' of '{}' is not)",
                    reduction.source->name(), tag));
  }
  const Sources sources = sources_of(reduction, reduce.what);
  device::Device& device = link_.device();
  if (ring_ == nullptr) make_ring();
  ++count_;
  // On a stream that waits for nothing else, so that peers learn of it at once.
  const auto computed = device.compute_stream().record();
  device::Event& written = reduction.written != nullptr ? *reduction.written : *computed;
  link_.sums().wait_for(written);
  link_.announcements().wait_for(written);
  if (times != nullptr) times->ready = link_.announcements().record_timed();
  for (int turn = 0; turn < link_.peers(); ++turn) {
    device.write_flag(link_.flag(Kind::kWritten, link_.rank(), link_.peer(turn)), count_,
                      link_.announcements());
  }
  const std::size_t numel = reduction.result.size();
  const std::size_t most =
      kReducePiece.size() / static_cast<std::size_t>(size_of(reduction.dtype).value);
  for (std::size_t begin = 0; begin < numel; begin += most) {
    add_piece(reduction, sources, begin, std::min(most, numel - begin), begin == 0, times);
  }
  if (times != nullptr) times->end = link_.sums().record_timed();
  auto released = release();
  if (times != nullptr) times->complete = link_.releases().record_timed();
  return released;
}

PeerReductions::Sources PeerReductions::sources_of(const Reduction& reduction,
                                                   std::string_view what) {
  const std::uint64_t number = *link_.buffers()->number_of(*reduction.source);
  const std::vector<std::uint64_t> numbers = link_.agree(std::string(what), number);
  const Bytes slice =
      bytes_of(Numel(static_cast<std::int64_t>(reduction.result.size())), reduction.dtype);
  const Bytes offset = reduction.source_offset + slice * link_.rank();
  Sources sources;
  for (int r = 0; r < link_.world_size(); ++r) {
    if (r == link_.rank() || slice.value == 0) {
      sources.push_back(const_cast<SharedBuffer*>(reduction.source)->local().data() +
                        offset.size());
      continue;
    }
    const std::uint64_t theirs = numbers[static_cast<std::size_t>(r)];
    sources.push_back(link_.reach(r, PeerBuffers::key_of_number(theirs), reduction.source->name(),
                                  offset, slice, what));
  }
  return sources;
}

void PeerReductions::make_ring() {
  const Bytes place = kReducePiece * link_.peers();
  ring_ = link_.device().allocate_uncharged(place * static_cast<int>(places_.size()));
  for (std::size_t i = 0; i < places_.size(); ++i) {
    places_[i].memory = ring_->bytes().subspan(i * place.size(), place.size());
  }
}

void PeerReductions::add_piece(const Reduction& reduction, const Sources& sources,
                               std::size_t begin, std::size_t numel, bool first, WorkTimes* times) {
  device::Device& device = link_.device();
  Place& place = places_[turn_++ % places_.size()];
  const auto item = static_cast<std::size_t>(size_of(reduction.dtype).value);
  for (int i = 0; place.added && i < link_.lanes(); ++i) {
    link_.reduce_lane(i).wait_for(*place.added);
  }
  std::vector<const std::byte*> pieces(sources.size());
  for (int turn = 0; turn < link_.peers(); ++turn) {
    const int from = link_.peer(turn);
    const auto index = static_cast<std::size_t>(from);
    device::Stream& lane = link_.reduce_lane(turn);
    if (first) device.wait_flag(link_.flag(Kind::kWritten, from, link_.rank()), count_, lane);
    if (first && turn == 0 && times != nullptr) times->begin = lane.record_timed();
    const std::span<std::byte> here =
        place.memory.subspan(static_cast<std::size_t>(turn) * kReducePiece.size(), numel * item);
    device.copy(here, {sources[index] + begin * item, numel * item}, lane);
    pieces[index] = here.data();
  }
  const auto own = static_cast<std::size_t>(link_.rank());
  pieces[own] = sources[own] + begin * item;
  for (int i = 0; i < link_.lanes(); ++i) link_.sums().wait_for(*link_.reduce_lane(i).record());
  device.sum_in_order(reduction.result.subspan(begin, numel), pieces, reduction.dtype,
                      reduction.scale, reduction.accumulate, link_.sums());
  place.added = link_.sums().record();
}

std::unique_ptr<device::Event> PeerReductions::release() {
  device::Device& device = link_.device();
  for (int turn = 0; turn < link_.peers(); ++turn) {
    device.write_flag(link_.flag(Kind::kRead, link_.rank(), link_.peer(turn)), count_,
                      link_.reduce_lane(turn));
  }
  link_.releases().wait_for(*link_.sums().record());
  for (int turn = 0; turn < link_.peers(); ++turn) {
    device.wait_flag(link_.flag(Kind::kRead, link_.peer(turn), link_.rank()), count_,
                     link_.releases());
  }
  return link_.releases().record();
}

}  // namespace strata::comm
