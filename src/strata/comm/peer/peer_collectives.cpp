#include "strata/comm/peer/peer_collectives.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/inbox.h"
#include "strata/comm/peer/peer_link.h"

namespace strata::comm {
namespace {

constexpr Bytes kBroadcastPiece = 32_MiB;
// Up to here two copies by way of the host take less time than shared memory of the device to
// allocate, hand out and map.
constexpr Bytes kThroughHostMost = 256_KiB;

using Kind = PeerFlags::Kind;

// Reductions between devices that reach each other's memory: each rank adds up its slice of all
// contributions, reading its peers' where they lie, all on the link's stream of reductions.
class PeerReductions {
 public:
  explicit PeerReductions(PeerLink& link) : link_(link) {}

  struct Started {
    std::shared_ptr<device::Event> added;  // the result is there
    std::uint32_t number = 0;              // of the reduction, for the functions below
  };
  // Collective. `times`: null if they are not wanted.
  Started start(const Reduction& reduction, std::string_view tag, WorkTimes* times) {
    const BulkOperation reduce = describe_reduction(reduction, link_.world_size(), tag);
    if (!link_.buffers()->number_of(*reduction.source))
      throw_foreign_buffer("source of a reduce_scatter", *reduction.source, tag);
    const Sources sources = sources_of(reduction, reduce.what);
    begin(reduction.writer != nullptr ? *reduction.writer : link_.device().compute_stream(), times);
    add(reduction, sources);
    return end(times);
  }

  using Sources = std::vector<const std::byte*>;  // this rank's slice of each rank's contribution
  // Collective: of contributions that their ranks write into this rank's memory, on their streams
  // of contributions, before they come here.
  Started start_arrived(const Reduction& reduction, const Sources& here, WorkTimes* times) {
    begin(link_.contributions(), times);
    add(reduction, here);
    return end(times);
  }

  // Collective: an exchange is a reduction that copies instead of adding.
  Started start(const Exchange& exchange, std::string_view tag, WorkTimes* times) {
    const Parcels& parcels = *exchange.parcels;
    const int mine = link_.rank();
    const BulkOperation operation = describe_exchange(exchange, mine, link_.world_size(), tag);
    const auto number = link_.buffers()->number_of(*exchange.source);
    if (!number) throw_foreign_buffer("source of an exchange", *exchange.source, tag);
    const std::vector<std::uint64_t> numbers = link_.agree_on_operation(operation.what, *number);
    const auto source_of = [&](int from, Bytes bytes) -> std::span<const std::byte> {
      const Bytes offset = parcels.in_source(from, mine);
      if (from == mine) return operation.source.subspan(offset.size(), bytes.size());
      const std::uint64_t theirs = numbers[static_cast<std::size_t>(from)];
      return {link_.reach(from, PeerBuffers::key_of_number(theirs), exchange.source->name(), offset,
                          bytes, operation.what),
              bytes.size()};
    };
    struct Copy {
      std::span<std::byte> target;
      std::span<const std::byte> source;
    };
    std::vector<Copy> copies;  // peers are reached before any stream waits for one
    for (int turn = 0; turn <= link_.peers(); ++turn) {
      const int from = turn == link_.peers() ? mine : link_.peer(turn);
      const Bytes bytes = parcels.at(from, mine);
      if (bytes == Bytes()) continue;
      const Bytes offset = parcels.in_target(from, mine);
      copies.push_back(
          {exchange.target.subspan(offset.size(), bytes.size()), source_of(from, bytes)});
    }
    begin(link_.device().compute_stream(), times);
    for (const Copy& copy : copies)
      link_.device().copy(copy.target, copy.source, link_.reductions());
    return end(times);
  }

  // Whether the peers have read this rank's contribution to the first `number` reductions; and has
  // the compute stream wait until they have.
  bool read_by_all(std::uint32_t number) const { return link_.reached_by_all(Kind::kRead, number); }
  void wait_for_readers(std::uint32_t number) {
    if (read_by_all(number)) return;
    link_.wait_for_all(Kind::kRead, number, link_.device().compute_stream());
  }
  std::uint32_t count() const { return count_; }

 private:
  Sources sources_of(const Reduction& reduction, std::string_view what) {
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
  // The waits around the additions: begin() waits for every rank's contribution, and end()
  // notifies every rank that the result is there.
  // The stream that wrote the contribution publishes it without any wait: peers learn of it at
  // once.
  void begin(device::Stream& writer, WorkTimes* times) {
    ++count_;
    device::Stream& stream = link_.reductions();
    stream.wait_for(*writer.record());
    if (times != nullptr) times->ready = writer.record_timed();
    link_.notify_all(Kind::kWritten, count_, writer);
    link_.wait_for_all(Kind::kWritten, count_, stream);
    if (times != nullptr) times->begin = stream.record_timed();
  }
  Started end(WorkTimes* times) {
    device::Stream& stream = link_.reductions();
    link_.notify_all(Kind::kRead, count_, stream);
    if (times != nullptr) times->end = stream.record_timed();
    std::shared_ptr<device::Event> added = stream.record();
    link_.note_reduction(added);
    return {std::move(added), count_};
  }
  void add(const Reduction& reduction, const Sources& sources) {
    if (reduction.result.empty()) return;
    link_.device().sum_in_order(reduction.result, sources, reduction.dtype, reduction.scale,
                                reduction.accumulate, link_.reductions());
  }

  PeerLink& link_;
  std::uint32_t count_ = 0;
};

// An operation that peers have started on their streams, as Work: complete when a stream of this
// rank has come to its end and, for a reduction, the peers have read this rank's contribution.
// wait() makes the compute stream wait; the host does not. Threads: one. Ownership: shares link and
// reductions. Errors: CommError from wait(), once any rank has failed; a destructor waits, too, and
// drops it.
class PeerWork final : public Work {
 public:
  // `end` null: the compute stream waits for it already.
  PeerWork(std::shared_ptr<PeerLink> link, std::unique_ptr<device::Event> end, WorkTimes times = {})
      : PeerWork(std::move(link), nullptr, {std::move(end), 0}, std::move(times)) {}
  // `reductions`: of `link`, and live no longer than it.
  PeerWork(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
           PeerReductions::Started started, WorkTimes times)
      : link_(std::move(link)),
        reductions_(std::move(reductions)),
        started_(std::move(started)),
        times_(std::move(times)) {}
  ~PeerWork() override {
    FirstError dropped;  // wait() reports it
    dropped.attempt([this] { join(); });
  }

  bool done() override {
    return started_.added == nullptr ||
           (started_.added->done() &&
            (reductions_ == nullptr || reductions_->read_by_all(started_.number)));
  }
  void wait() override {
    if (started_.added == nullptr) return;
    link_->require_usable();
    join();
    if (reductions_ != nullptr) link_->require_usable();
  }
  WorkTimes times() const override { return times_; }

 private:
  void join() {
    if (started_.added == nullptr) return;
    link_->device().compute_stream().wait_for(*started_.added);
    if (reductions_ != nullptr) reductions_->wait_for_readers(started_.number);
    started_.added.reset();
  }

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;  // null: not a reduction
  PeerReductions::Started started_;             // no event: the compute stream waits already
  WorkTimes times_;
};

// Complete when every rank has ended a round of gathers, which this one ends now. Not to wait for
// it is no error. Threads, ownership, errors: as PeerWork.
class RoundWork final : public Work {
 public:
  RoundWork(std::shared_ptr<PeerLink> link, std::uint32_t round)
      : link_(std::move(link)), round_(round) {
    link_->require_usable();
    link_->notify_all(Kind::kRounds, round_, link_->gathers());
    own_ = link_->gathers().record();
  }

  bool done() override { return own_->done() && link_->reached_by_all(Kind::kRounds, round_); }
  void wait() override {
    link_->require_usable();
    if (std::exchange(waits_, true)) return;
    device::Stream& compute = link_->device().compute_stream();
    compute.wait_for(*own_);
    link_->wait_for_all(Kind::kRounds, round_, compute);
  }

 private:
  std::shared_ptr<PeerLink> link_;
  std::uint32_t round_;
  std::unique_ptr<device::Event> own_;  // the end of this rank's gathers
  bool waits_ = false;                  // the compute stream
};

// The inbox of ranks whose devices reach each other's memory: pushes by copy engines, on the stream
// of contributions. A rank's flags say what it has written for each peer, and what it has added up
// and others may overwrite; they are those of the reductions that pull, and count with them.
// Threads, errors: inbox.h. Ownership: shares link and reductions.
class PeerInbox final : public Inbox {
 public:
  // `memory`: of these peers. `records_times`: whether works know when their bytes moved.
  PeerInbox(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
            std::unique_ptr<SharedBuffer> memory, std::shared_ptr<const bool> records_times)
      : link_(std::move(link)),
        reductions_(std::move(reductions)),
        memory_(std::move(memory)),
        records_times_(std::move(records_times)),
        ring_(Bytes(memory_->local().size())),
        bases_(static_cast<std::size_t>(link_->world_size())) {
    bases_[static_cast<std::size_t>(link_->rank())] = memory_->local().data();
  }

  void expect(std::span<const Bytes> contributions) override {
    ring_.expect(contributions);
    opened_.assign(contributions.size(), false);
  }
  bool writable(std::size_t index) const override { return ring_.after(index).has_value(); }
  void write(std::size_t index, Numel begin, std::span<const std::byte> values,
             DType dtype) override {
    open(index);
    device::Device& device = link_->device();
    const Bytes first = bytes_of(begin, dtype);
    by_owner(
        index, first, first + Bytes(values.size()),
        [&](int owner, std::byte* target, Bytes from, Bytes bytes) {
          const std::span<const std::byte> source = values.subspan(from.size(), bytes.size());
          if (owner == link_->rank()) {  // a kernel copies faster than an engine within a device
            device.cast(target, dtype, source.data(), dtype, Numel(bytes / size_of(dtype)),
                        link_->contributions());
          } else {
            device.copy({target, bytes.size()}, source, link_->contributions());
          }
        });
  }
  void write_zero(std::size_t index, Numel begin, Numel numel, DType dtype) override {
    open(index);
    by_owner(index, bytes_of(begin, dtype), bytes_of(begin + numel, dtype),
             [&](int, std::byte* target, Bytes, Bytes bytes) {
               link_->device().fill_zero({target, bytes.size()}, link_->contributions());
             });
  }
  std::unique_ptr<Work> reduce(std::size_t index, const Reduction& reduction,
                               std::string_view tag) override {
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
    added_.push_back({started.number, started.added});
    // The caller's memory was read before; the room's readers are the ring's concern.
    started.number = 0;
    return std::make_unique<PeerWork>(link_, reductions_, std::move(started), std::move(times));
  }

 private:
  // Has contributions wait for the room on every rank, once.
  void open(std::size_t index) {
    link_->require_usable();
    if (opened_[index]) return;
    opened_[index] = true;
    const std::optional<std::uint32_t> after = ring_.after(index);
    STRATA_ASSERT(after);
    if (*after == 0) return;
    link_->wait_for_all(Kind::kRead, *after, link_->contributions());
    while (added_.front().number < *after) added_.pop_front();
    link_->contributions().wait_for(*added_.front().event);  // this rank's own room
  }
  // The parts of elements' bytes [begin, end) by owner: calls part(owner, target, first, bytes),
  // `first` counted from `begin`.
  template <typename Part>
  void by_owner(std::size_t index, Bytes begin, Bytes end, Part&& part) {
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
  std::byte* base_of(int rank) {
    std::byte*& base = bases_[static_cast<std::size_t>(rank)];
    if (base == nullptr) {
      // The mapping is one that may be written, too.
      base = const_cast<std::byte*>(link_->reach(rank, PeerBuffers::key_of_name(memory_->name()),
                                                 memory_->name(), Bytes(),
                                                 Bytes(memory_->local().size()), "gradients"));
    }
    return base;
  }
  Bytes slice_of(std::size_t index) const {
    return Bytes(ring_.bytes(index).value / link_->world_size());
  }

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;
  std::unique_ptr<SharedBuffer> memory_;
  std::shared_ptr<const bool> records_times_;
  InboxRing ring_;
  struct Added {
    std::uint32_t number = 0;
    std::shared_ptr<device::Event> event;
  };
  std::deque<Added> added_;        // by this rank; the last one stays
  std::vector<bool> opened_;       // by index
  std::vector<std::byte*> bases_;  // by rank; null: not reached yet
};

class PeerCollectives final : public Collectives {
 public:
  PeerCollectives(std::shared_ptr<device::Device> device, std::shared_ptr<Collectives> control,
                  const CommOptions& options)
      : Collectives(control->rank(), among(kPeerTraits, control->rank(), control->world_size())),
        link_(std::make_shared<PeerLink>(std::move(device), std::move(control), options)),
        reductions_(std::make_shared<PeerReductions>(*link_)) {
    link_->buffers()->set_before_free([link = link_.get()] { link->wait_for_readers(); });
  }

  ~PeerCollectives() override {
    link_->wait_for_readers();
    link_->buffers()->set_before_free([device = &link_->device()] {
      FirstError of_lost_device;  // dropped: it runs nothing
      of_lost_device.attempt([&] { device->compute_stream().synchronize(); });
    });
  }

  std::string_view name() const override { return "peer"; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    link_->require_usable();
    return PeerBuffers::allocate(link_->buffers(), std::move(name), bytes, false);
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    link_->require_usable();
    auto buffer = PeerBuffers::allocate(link_->buffers(), std::move(name), bytes, true);
    link_->map_ahead(*buffer);
    return buffer;
  }
  void unmap_freed() override { link_->unmap_freed(); }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    link_->require_usable();
    const BulkOperation gather = describe_gather(slices, flat, rank(), world_size(), tag);
    if (slices.buffer == nullptr)
      throw UsageError("{} needs a buffer, since peers read it; got none", gather.what);
    if (!link_->buffers()->number_of(*slices.buffer))
      throw_foreign_buffer("buffer of an all_gather", *slices.buffer, tag);
    const std::size_t bytes = slices.slice_bytes.size();
    if (bytes == 0) return std::make_unique<PeerWork>(link_, nullptr);
    const std::string key = PeerBuffers::key_of_name(slices.buffer->name());
    std::vector<const std::byte*> sources;
    for (int turn = 0; turn < link_->peers(); ++turn) {
      const int from = link_->peer(turn);
      sources.push_back(link_->reach(from, key, slices.buffer->name(),
                                     slices.first_offset + slices.stride * from, slices.slice_bytes,
                                     gather.what));
    }
    device::Device& device = link_->device();
    device::Stream& stream = link_->gathers();
    stream.wait_for(*device.compute_stream().record());
    const auto target = [&](int from) {
      return flat.subspan(static_cast<std::size_t>(from) * bytes, bytes);
    };
    WorkTimes times;
    if (*records_times_) times.begin = stream.record_timed();
    for (int turn = 0; turn < link_->peers(); ++turn) {
      device.copy(target(link_->peer(turn)), {sources[static_cast<std::size_t>(turn)], bytes},
                  stream);
    }
    if (target(rank()).data() != gather.source.data())
      device.copy(target(rank()), gather.source, stream);
    if (*records_times_) times.end = stream.record_timed();
    return std::make_unique<PeerWork>(link_, stream.record(), std::move(times));
  }

  std::unique_ptr<Work> finish_gathers() override {
    return std::make_unique<RoundWork>(link_, ++rounds_);
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return started(reduction, tag);
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return started(exchange, tag);
  }
  device::Stream* stream(Traffic traffic) override {
    if (traffic == Traffic::kGathers) return &link_->gathers();
    return traffic == Traffic::kContributions ? &link_->contributions() : &link_->reductions();
  }
  std::unique_ptr<Inbox> make_inbox(std::string name, Bytes bytes) override {
    return std::make_unique<PeerInbox>(link_, reductions_, allocate(std::move(name), bytes),
                                       records_times_);
  }
  void record_times(bool on) override { *records_times_ = on; }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    const std::string what = fmt::format("all-reduce of {} values", values.size());
    link_->agree_on_operation(what);
    link_->gathers().synchronize();  // shards may change when all ranks have come here
    link_->controlled(what, [&] { link_->control().all_reduce(values, op); });
  }

  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    link_->exchange(all, mine);
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const std::string what = describe_broadcast(Bytes(bytes.size()), root, world_size());
    link_->agree_on_operation(what);
    if (bytes.empty() || world_size() == 1) return;
    if (link_->device().host_accessible(bytes.data())) {
      link_->controlled(what, [&] { link_->control().broadcast(bytes, root); });
    } else if (bytes.size() <= kThroughHostMost.size()) {
      broadcast_through_host(bytes, root, what);
    } else {
      broadcast_on_device(bytes, root);
    }
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return link_->controlled("exchange of texts",
                             [&] { return link_->control().all_gather_text(text); });
  }

  void barrier() override {
    reductions_->wait_for_readers(reductions_->count());
    link_->barrier();
  }

  // Sends bytes from every rank to every other; throws on every rank where some do not arrive.
  void prove() {
    constexpr std::size_t kBytes = 4096;
    const auto byte_of = [](std::size_t rank) { return static_cast<std::byte>(rank * 7 + 1); };
    device::Device& device = link_->device();
    std::unique_ptr<SharedBuffer> buffer;
    std::unique_ptr<device::Memory> flat;
    std::vector<std::byte> all(kBytes * static_cast<std::size_t>(world_size()));
    const auto attempt = [&](const auto& step) {
      agree_all_can(all_gather_text(error_of(step)), "read its peers' memory", link_->names());
    };
    attempt([&] {
      buffer = allocate("proof", Bytes(kBytes));
      flat = device.allocate_uncharged(Bytes(all.size()));
      const std::vector<std::byte> mine(kBytes, byte_of(static_cast<std::size_t>(rank())));
      device.copy(buffer->local(), mine, device.compute_stream());
      device.compute_stream().synchronize();
    });
    attempt([&] { link_->map_from_all("proof", Bytes(kBytes)); });
    barrier();
    attempt([&] {
      all_gather({buffer.get(), Bytes(), Bytes(), Bytes(kBytes)}, flat->bytes(), "proof")->wait();
      device.copy(all, flat->bytes(), device.compute_stream());
      device.compute_stream().synchronize();
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i] == byte_of(i / kBytes)) continue;
        throw CommError("what rank {} wrote does not arrive",
                        link_->names().of(static_cast<int>(i / kBytes)));
      }
    });
    barrier();
  }

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    link_->control().announce_departure(words);
  }
  void all_left() noexcept override { link_->control().all_left(); }

  void require_usable() override {
    link_->require_usable();
    link_->controlled("asking for the peers", [&] { link_->control().require_usable(); });
  }

  void end(Ending ending, std::string_view reason) noexcept override { link_->end(ending, reason); }

 private:
  template <typename Operation>
  std::unique_ptr<Work> started(const Operation& operation, std::string_view tag) {
    link_->require_usable();
    WorkTimes times;
    auto started = reductions_->start(operation, tag, *records_times_ ? &times : nullptr);
    return std::make_unique<PeerWork>(link_, reductions_, std::move(started), std::move(times));
  }
  // Piece by piece through shared memory of the root.
  void broadcast_on_device(std::span<std::byte> bytes, int root) {
    device::Device& device = link_->device();
    device::Stream& compute = device.compute_stream();
    device::Stream& gathers = link_->gathers();
    const std::size_t piece = std::min(bytes.size(), kBroadcastPiece.size());
    const auto buffer = allocate("broadcast", Bytes(rank() == root ? piece : 1));
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      const std::span<std::byte> part = bytes.subspan(at, std::min(piece, bytes.size() - at));
      if (rank() == root) device.copy(buffer->local().first(part.size()), part, compute);
      barrier();
      if (rank() != root) {
        const std::byte* source =
            link_->reach(root, PeerBuffers::key_of_name("broadcast"), "broadcast", Bytes(),
                         Bytes(part.size()), "broadcast");
        gathers.wait_for(*compute.record());  // which may still use what is replaced
        device.copy(part, {source, part.size()}, gathers);
      }
      compute.wait_for(*gathers.record());  // so the others know by the barrier that it is read
      barrier();
      compute.wait_for(*gathers.record());  // which waits for all at the barrier
    }
    barrier();
  }
  void broadcast_through_host(std::span<std::byte> bytes, int root, const std::string& what) {
    device::Device& device = link_->device();
    device::Stream& compute = device.compute_stream();
    std::vector<std::byte> copy(bytes.size());
    if (rank() == root) {
      device.copy(copy, bytes, compute);
      compute.synchronize();
    }
    link_->controlled(what, [&] { link_->control().broadcast(copy, root); });
    if (rank() == root) return;
    device.copy(bytes, copy, compute);
    compute.synchronize();
  }

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;
  std::uint32_t rounds_ = 0;  // of gathers
  std::shared_ptr<bool> records_times_ = std::make_shared<bool>(false);
};

}  // namespace

std::unique_ptr<Collectives> make_peer_collectives(std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<Collectives> control,
                                                   const CommOptions& options) {
  auto collectives =
      std::make_unique<PeerCollectives>(std::move(device), std::move(control), options);
  collectives->prove();
  return collectives;
}

}  // namespace strata::comm
