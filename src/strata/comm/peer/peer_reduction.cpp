#include "strata/comm/peer/peer_reduction.h"

#include <fmt/core.h>

#include "strata/base/error.h"
#include "strata/comm/bulk_operation.h"

namespace strata::comm {

using Kind = PeerFlags::Kind;

PeerReductions::Started PeerReductions::start(const Reduction& reduction, std::string_view tag,
                                              WorkTimes* times) {
  const BulkOperation reduce = describe_reduction(reduction, link_.world_size(), tag);
  if (!link_.buffers()->number_of(*reduction.source)) {
    throw UsageError(
        fmt::format("the source of a reduce_scatter must be allocated by the same "
                    "collectives ('{}' of '{}' is not)",
                    reduction.source->name(), tag));
  }
  const Sources sources = sources_of(reduction, reduce.what);
  begin(reduction.writer != nullptr ? *reduction.writer : link_.device().compute_stream(), times);
  add(reduction, sources);
  return end(times);
}

PeerReductions::Started PeerReductions::start_arrived(const Reduction& reduction,
                                                      const Sources& here, WorkTimes* times) {
  begin(link_.transfers(), times);
  add(reduction, here);
  return end(times);
}

void PeerReductions::add(const Reduction& reduction, const Sources& sources) {
  if (reduction.result.empty()) return;
  link_.device().sum_in_order(reduction.result, sources, reduction.dtype, reduction.scale,
                              reduction.accumulate, link_.transfers());
}

// The stream that wrote the contribution publishes it without any wait: peers learn of it at once.
void PeerReductions::begin(device::Stream& writer, WorkTimes* times) {
  device::Device& device = link_.device();
  ++count_;
  if (&writer != &link_.transfers()) link_.transfers().wait_for(*writer.record());
  if (times != nullptr) times->ready = writer.record_timed();
  for (int turn = 0; turn < link_.peers(); ++turn) {
    device.write_flag(link_.flag(Kind::kWritten, link_.rank(), link_.peer(turn)), count_, writer);
  }
  for (int turn = 0; turn < link_.peers(); ++turn)
    link_.wait_for(Kind::kWritten, link_.peer(turn), count_, link_.transfers());
  if (times != nullptr) times->begin = link_.transfers().record_timed();
}

PeerReductions::Started PeerReductions::end(WorkTimes* times) {
  for (int turn = 0; turn < link_.peers(); ++turn) {
    link_.device().write_flag(link_.flag(Kind::kRead, link_.rank(), link_.peer(turn)), count_,
                              link_.transfers());
  }
  if (times != nullptr) times->end = link_.transfers().record_timed();
  link_.note_reduction(link_.transfers().record());
  return {link_.transfers().record(), count_};
}

bool PeerReductions::read_by_all(std::uint32_t number) const {
  for (int turn = 0; turn < link_.peers(); ++turn) {
    if (!device::reached(link_.flag(Kind::kRead, link_.peer(turn), link_.rank()).load(), number))
      return false;
  }
  return true;
}

void PeerReductions::wait_for_readers(std::uint32_t number) {
  if (read_by_all(number)) return;
  for (int turn = 0; turn < link_.peers(); ++turn)
    link_.wait_for(Kind::kRead, link_.peer(turn), number, link_.device().compute_stream());
}

PeerReductions::Sources PeerReductions::sources_of(const Reduction& reduction,
                                                   std::string_view what) {
  const std::uint64_t number = *link_.buffers()->number_of(*reduction.source);
  const std::vector<std::uint64_t> numbers = link_.agree_on_operation(std::string(what), number);
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

}  // namespace strata::comm
