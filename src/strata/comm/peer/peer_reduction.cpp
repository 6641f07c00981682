#include "strata/comm/peer/peer_reduction.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"

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

PeerWork::PeerWork(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
                   PeerReductions::Started started, WorkTimes times)
    : link_(std::move(link)),
      reductions_(std::move(reductions)),
      started_(std::move(started)),
      times_(std::move(times)) {}

PeerWork::~PeerWork() {
  try {
    join();
  } catch (const std::exception&) {
    return;  // wait() reports the error
  }
}

bool PeerWork::done() {
  return started_.added == nullptr ||
         (started_.added->done() &&
          (reductions_ == nullptr || reductions_->read_by_all(started_.number)));
}

void PeerWork::wait() {
  if (started_.added == nullptr) return;
  link_->require_usable();
  join();
  if (reductions_ != nullptr) link_->require_usable();
}

void PeerWork::join() {
  if (started_.added == nullptr) return;
  link_->device().compute_stream().wait_for(*started_.added);
  if (reductions_ != nullptr) reductions_->wait_for_readers(started_.number);
  started_.added.reset();
}

RoundWork::RoundWork(std::shared_ptr<PeerLink> link, std::uint32_t round)
    : link_(std::move(link)), round_(round) {
  link_->require_usable();
  for (int turn = 0; turn < link_->peers(); ++turn) {
    link_->device().write_flag(link_->flag(Kind::kRounds, link_->rank(), link_->peer(turn)), round_,
                               link_->transfers());
  }
  own_ = link_->transfers().record();
}

bool RoundWork::done() {
  if (!own_->done()) return false;
  for (int turn = 0; turn < link_->peers(); ++turn) {
    const device::Flag& theirs = link_->flag(Kind::kRounds, link_->peer(turn), link_->rank());
    if (!device::reached(theirs.load(), round_)) return false;
  }
  return true;
}

void RoundWork::wait() {
  link_->require_usable();
  if (std::exchange(waits_, true)) return;
  device::Stream& compute = link_->device().compute_stream();
  compute.wait_for(*own_);
  for (int turn = 0; turn < link_->peers(); ++turn)
    link_->wait_for(Kind::kRounds, link_->peer(turn), round_, compute);
}

PeerInbox::PeerInbox(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
                     std::unique_ptr<SharedBuffer> memory,
                     std::shared_ptr<const bool> records_times)
    : link_(std::move(link)),
      reductions_(std::move(reductions)),
      memory_(std::move(memory)),
      records_times_(std::move(records_times)),
      ring_(Bytes(memory_->local().size())),
      bases_(static_cast<std::size_t>(link_->world_size())) {
  bases_[static_cast<std::size_t>(link_->rank())] = memory_->local().data();
}

void PeerInbox::expect(std::span<const Bytes> contributions) {
  ring_.expect(contributions);
  opened_.assign(contributions.size(), false);
}

Bytes PeerInbox::slice_of(std::size_t index) const {
  return Bytes(ring_.bytes(index).value / link_->world_size());
}

std::byte* PeerInbox::base_of(int rank) {
  std::byte*& base = bases_[static_cast<std::size_t>(rank)];
  if (base == nullptr) {
    // The mapping is one that may be written, too.
    base = const_cast<std::byte*>(link_->reach(rank, PeerBuffers::key_of_name(memory_->name()),
                                               memory_->name(), Bytes(),
                                               Bytes(memory_->local().size()), "gradients"));
  }
  return base;
}

void PeerInbox::open(std::size_t index) {
  link_->require_usable();
  if (opened_[index]) return;
  opened_[index] = true;
  const std::optional<std::uint32_t> after = ring_.after(index);
  STRATA_ASSERT(after);
  if (*after == 0) return;
  for (int turn = 0; turn < link_->peers(); ++turn)
    link_->wait_for(Kind::kRead, link_->peer(turn), *after, link_->transfers());
}

template <typename Part>
void PeerInbox::by_owner(std::size_t index, Bytes begin, Bytes end, Part&& part) {
  STRATA_ASSERT(end <= ring_.bytes(index));
  const Bytes slice = slice_of(index);
  Bytes at = begin;
  while (at < end) {
    const auto owner = static_cast<int>(at.value / slice.value);
    const Bytes stop = std::min(end, slice * (owner + 1));
    std::byte* const target =
        base_of(owner) +
        (ring_.offset(index) + slice * link_->rank() + (at - slice * owner)).size();
    part(owner, target, at - begin, stop - at);
    at = stop;
  }
}

void PeerInbox::write(std::size_t index, Numel begin, std::span<const std::byte> values,
                      DType dtype) {
  open(index);
  device::Device& device = link_->device();
  const Bytes first = bytes_of(begin, dtype);
  by_owner(index, first, first + Bytes(values.size()),
           [&](int owner, std::byte* target, Bytes from, Bytes bytes) {
             const std::span<const std::byte> source = values.subspan(from.size(), bytes.size());
             if (owner == link_->rank()) {  // a kernel copies faster than an engine within a device
               device.cast(target, dtype, source.data(), dtype, Numel(bytes / size_of(dtype)),
                           link_->transfers());
             } else {
               device.copy({target, bytes.size()}, source, link_->transfers());
             }
           });
}

void PeerInbox::write_zero(std::size_t index, Numel begin, Numel numel, DType dtype) {
  open(index);
  by_owner(index, bytes_of(begin, dtype), bytes_of(begin + numel, dtype),
           [&](int, std::byte* target, Bytes, Bytes bytes) {
             link_->device().fill_zero({target, bytes.size()}, link_->transfers());
           });
}

std::unique_ptr<Work> PeerInbox::reduce(std::size_t index, const Reduction& reduction,
                                        std::string_view tag) {
  const Bytes slice = slice_of(index);
  STRATA_ASSERT(bytes_of(Numel(reduction.result.size()), reduction.dtype) == slice);
  link_->agree_on_operation(fmt::format("reduction of '{}' ({} {} a rank, written by each)", tag,
                                        reduction.result.size(), name_of(reduction.dtype)));
  open(index);
  PeerReductions::Sources sources;
  for (int r = 0; r < link_->world_size(); ++r)
    sources.push_back(memory_->local().data() + (ring_.offset(index) + slice * r).size());
  WorkTimes times;
  PeerReductions::Started started =
      reductions_->start_arrived(reduction, sources, *records_times_ ? &times : nullptr);
  ring_.begun(index, started.number);
  // The caller's memory was read before; the room's readers are the ring's concern.
  started.number = 0;
  return std::make_unique<PeerWork>(link_, reductions_, std::move(started), std::move(times));
}

}  // namespace strata::comm
