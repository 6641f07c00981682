#include "strata/comm/peer/peer_inbox.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/peer/peer_work.h"

namespace strata::comm {

using Kind = PeerFlags::Kind;

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
  return std::make_unique<ReductionWork>(link_, reductions_, std::move(started), std::move(times));
}

}  // namespace strata::comm
