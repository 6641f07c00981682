// One rank's end of the peer collectives: its shared memory and what it sees of its peers', the
// flags, the streams, and the one failure that ends them all.
// Threads: the rank's, but for what PeerChannel::Service says. Ownership: shared by the collectives
// and the works that they started. Errors: CommError, the same at every later call.
#pragma once

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/peer/peer_buffers.h"
#include "strata/comm/peer/peer_channel.h"
#include "strata/comm/peer/peer_signals.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {

inline constexpr std::string_view kFlagsKey = "flags";
inline constexpr std::chrono::microseconds kAskAgainAfter(200);

inline std::string failed_because(std::string_view reason) {
  return fmt::format("failed: {}", reason);
}

class PeerLink final : public PeerChannel::Service {
 public:
  // Collective, and throws on every rank or on none.
  PeerLink(std::shared_ptr<device::Device> device, std::shared_ptr<Collectives> control,
           const CommOptions& options)
      : device_(std::move(device)),
        control_(std::move(control)),
        rank_(control_->rank()),
        world_size_(control_->world_size()),
        timeout_(options.timeout),
        names_(options.names),
        watch_(timeout_),
        buffers_(std::make_shared<PeerBuffers>(device_, rank_)),
        gathers_(device_->create_stream()),
        contributions_(device_->create_stream()),
        reductions_(device_->create_stream()) {
    std::string error;
    // Rank 0 pins before it shares: to pin may migrate pages, which fails while others pin them.
    if (rank_ == 0) error = error_of([this] { map_flags(flags_file_ = make_flags_file()); });
    channel_ = std::make_unique<PeerChannel>(*control_, *this, timeout_, names_);
    if (rank_ != 0) error = error_of([this] { map_flags(ask_for_flags_file()); });
    agree_all_can(control_->all_gather_text(error), "share memory with the others", names_);
    buffers_->set_before_unmap([this] { synchronize(); });
    mapper_ = std::make_unique<PeerMapper>(*buffers_, *channel_, rank_, world_size_);
  }
  ~PeerLink() override {
    if (failed_.load()) pass_on_failure();
    channel_->stop_asking();
    mapper_.reset();
    channel_.reset();  // its thread answers peers about the buffers
    buffers_->end_sharing();
  }

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const RankNames& names() const { return names_; }
  Collectives& control() { return *control_; }
  device::Device& device() { return *device_; }
  const std::shared_ptr<PeerBuffers>& buffers() { return buffers_; }
  device::Flag& flag(PeerFlags::Kind kind, int from, int to) { return flags_.at(kind, from, to); }
  // Later work of the stream runs when the peer's flag has reached `value`. A peer that lets it
  // wait for longer than the timeout ends this link, and with it the wait.
  void wait_for(PeerFlags::Kind kind, int peer, std::uint32_t value, device::Stream& stream) {
    device::Flag& theirs = flag(kind, peer, rank_);
    watch_.expect(kind, peer, theirs, value);
    device_->wait_flag(theirs, value, stream);
  }
  // The same for that flag of every peer.
  void wait_for_all(PeerFlags::Kind kind, std::uint32_t value, device::Stream& stream) {
    for (int turn = 0; turn < peers(); ++turn) wait_for(kind, peer(turn), value, stream);
  }
  // Has the stream write `value` to this rank's flag for every peer.
  void notify_all(PeerFlags::Kind kind, std::uint32_t value, device::Stream& stream) {
    for (int turn = 0; turn < peers(); ++turn)
      device_->write_flag(flag(kind, rank_, peer(turn)), value, stream);
  }
  // Whether that flag of every peer has reached `value`.
  bool reached_by_all(PeerFlags::Kind kind, std::uint32_t value) {
    for (int turn = 0; turn < peers(); ++turn) {
      if (!device::reached(flag(kind, peer(turn), rank_).load(), value)) return false;
    }
    return true;
  }
  // In the order in which this rank turns to peers, so that not all read from the same one.
  int peer(int turn) const { return (rank_ + 1 + turn) % world_size_; }
  int peers() const { return world_size_ - 1; }

  // Gathers and contributions are copies, which no reduction should hold up: the model waits for a
  // late gather, and for the memory of a gradient. Reductions alone wait for peers in each backward
  // pass: the device's scheduler makes every kernel's launch longer by the number of streams that
  // wait.
  device::Stream& gathers() { return *gathers_; }
  device::Stream& contributions() { return *contributions_; }
  device::Stream& reductions() { return *reductions_; }
  // Barriers have the compute stream wait for it.
  void note_reduction(std::shared_ptr<device::Event> added) { reduced_ = std::move(added); }

  // Bytes [offset, offset + bytes) of a peer's buffer; waits for it to be allocated. `what` says in
  // errors what for.
  const std::byte* reach(int rank, const std::string& key, std::string_view name, Bytes offset,
                         Bytes bytes, std::string_view what) {
    const auto give_up = std::chrono::steady_clock::now() + timeout_;
    for (;;) {
      require_usable();
      std::optional<PeerBuffers::View> view;
      try {
        view = buffers_->find(*channel_, rank, key, offset + bytes);
      } catch (const Error& error) {
        fail(fmt::format("{}: buffer '{}' of rank {} cannot be reached: {}", what, name,
                         names_.of(rank), error.what()));
      }
      if (view && view->mapped >= offset + bytes && view->bytes >= offset + bytes) {
        if (buffers_->may_be_freed(rank)) mapper_->look_for_freed();
        return view->base + offset.size();
      }
      if (view && view->bytes < offset + bytes) {
        fail(fmt::format(
            "{}: the slice of rank {} lies outside its buffer '{}'; every rank must allocate it "
            "for the same layout (offset {}, slice of {} B, buffer of {} B)",
            what, names_.of(rank), name, offset.value, bytes.value, view->bytes.value));
      }
      if (std::chrono::steady_clock::now() > give_up) {
        fail(
            fmt::format("{}: rank {} lives but has no buffer '{}' after {} ms; every rank must use "
                        "the same units",
                        what, names_.of(rank), name, timeout_.count()));
      }
      std::this_thread::sleep_for(kAskAgainAfter);
    }
  }

  // Peers' buffers of this name are mapped as they grow, beside what this rank does.
  void map_ahead(const SharedBuffer& buffer) {
    mapper_->map_ahead(buffer.name(), *buffers_->number_of(buffer));
  }
  // Maps a buffer that every rank has, and throws where that cannot be; nothing has failed then.
  void map_from_all(const std::string& name, Bytes bytes) {
    for (int turn = 0; turn < peers(); ++turn) {
      const auto view =
          buffers_->find(*channel_, peer(turn), PeerBuffers::key_of_name(name), bytes);
      if (!view || view->mapped < bytes)
        throw CommError("rank {} does not share '{}'", names_.of(peer(turn)), name);
    }
  }

  void require_usable() {
    if (!failed_.load()) return;
    pass_on_failure();
    const std::lock_guard lock(mutex_);
    throw CommError(failure_);
  }
  // The failure of this rank; the peers hear of it.
  [[noreturn]] void fail(const std::string& message) {
    // A peer that ended may show here before its own words arrive.
    if (!failed_.load()) stop(message, failed_because(message));
    const std::lock_guard lock(mutex_);
    throw CommError(failure_);
  }
  // Collectives::end().
  void end(Ending ending, std::string_view reason) noexcept {
    control_->end(ending, reason);
    try {
      std::string told =
          fmt::format("{}: {}", ending == Ending::kLeft ? "left" : "gave up", reason);
      stop(fmt::format("rank {} {}", names_.of(rank_), told), told);
    } catch (const std::exception&) {  // no memory for the words
      stop("a rank gave up", "gave up");
    }
  }
  // A call of the control plane; what it throws is the end of this link, too.
  template <typename Call>
  auto controlled(std::string_view what, Call&& call) -> decltype(call()) {
    require_usable();
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      fail(fmt::format("{}: {}", what, error.what()));
    }
  }
  void unmap_freed() {
    controlled("unmapping what was freed", [&] { buffers_->unmap_freed(*channel_, world_size_); });
  }
  std::vector<std::uint64_t> agree_on_operation(const std::string& what, std::uint64_t number = 0) {
    return controlled(what,
                      [&] { return comm::agree_on_operation(*control_, what, names_, number); });
  }
  // Work that a rank's streams get after it runs when the work that every rank's streams held
  // before it is done.
  void barrier() {
    agree_on_operation("barrier");
    ++barriers_;
    device::Stream& compute = device_->compute_stream();
    if (reduced_ != nullptr) compute.wait_for(*reduced_);
    // Gathers from before the barrier may still run: updates behind the barrier do not wait for
    // them.
    notify_all(PeerFlags::Kind::kBarrier, barriers_, compute);
    // The flag for gathers covers all that this rank reads of its peers' memory, and writes there.
    gathers_->wait_for(*contributions_->record());
    gathers_->wait_for(*reductions_->record());
    notify_all(PeerFlags::Kind::kGathered, barriers_, *gathers_);
    wait_for_all(PeerFlags::Kind::kBarrier, barriers_, *gathers_);
    require_usable();
  }
  // Exchanges device memory in the compute stream, for which this is a barrier.
  void exchange(std::span<std::byte> all, std::span<const std::byte> mine) {
    if (mine.size() > Collectives::kOnDeviceMost ||
        all.size() != mine.size() * static_cast<std::size_t>(world_size_)) {
      throw UsageError(
          "an exchange on devices takes at most {} B of each rank, and gives all of them; found {} "
          "B given and {} B wanted on {} ranks",
          Collectives::kOnDeviceMost, mine.size(), all.size(), world_size_);
    }
    agree_on_operation(fmt::format("exchange of {} B", mine.size()));
    ++exchanges_;
    device::Stream& compute = device_->compute_stream();
    compute.wait_for(*gathers_->record());
    const std::span<std::byte> values = flags_.values(exchanges_);
    const auto line_of = [&](int rank) {
      return values.subspan(static_cast<std::size_t>(rank) * PeerFlags::kLine, mine.size());
    };
    device_->copy(line_of(rank_), mine, compute);
    notify_all(PeerFlags::Kind::kGiven, exchanges_, compute);
    wait_for_all(PeerFlags::Kind::kGiven, exchanges_, compute);
    require_usable();
    for (int r = 0; r < world_size_; ++r)
      device_->copy(all.subspan(mine.size() * std::size_t(r), mine.size()), line_of(r), compute);
  }
  // Until peers have passed the last barrier in their streams, too.
  void wait_for_readers() noexcept {
    try {
      wait_for_all(PeerFlags::Kind::kGathered, barriers_, *gathers_);
      synchronize();
    } catch (const std::exception&) {
      return;  // a device that is lost runs nothing
    }
  }

  std::optional<SharedParts> share(const std::string& key, std::size_t first) override {
    if (key != kFlagsKey) return buffers_->share(key, first);
    if (!flags_file_.valid()) return std::nullopt;
    SharedParts parts;
    parts.pieces.push_back(
        {FileDescriptor(::fcntl(flags_file_.get(), F_DUPFD_CLOEXEC, 0)), Bytes(), Bytes()});
    return parts;
  }
  void failed(const std::string& message) noexcept override {
    try {
      set_failure(message, failed_because(message));
    } catch (const std::exception&) {  // no memory for the words
      set_failure("a rank failed", "failed");
    }
    if (flags_mapped_.load()) flags_.release(rank_);
  }
  std::optional<LatePeer> late_peer() override { return watch_.look(); }

 private:
  void synchronize() {
    for (device::Stream* const stream :
         {gathers_.get(), contributions_.get(), reductions_.get(), &device_->compute_stream()})
      stream->synchronize();
  }
  // of rank 0, which gives it to the others
  FileDescriptor make_flags_file() {
    const Bytes bytes = flags_bytes();
    FileDescriptor file(::memfd_create("strata-flags", MFD_CLOEXEC));
    if (!file.valid() || ::ftruncate(file.get(), bytes.value) != 0)
      throw CommError("no shared memory of {}: {}", to_string(bytes), errno_text(errno));
    return file;
  }
  // of the other ranks
  FileDescriptor ask_for_flags_file() {
    std::optional<SharedParts> parts = channel_->ask(0, std::string(kFlagsKey), 0);
    if (!parts || parts->pieces.empty())
      throw CommError("the first rank has no shared memory to give");
    return std::move(parts->pieces.front().descriptor);
  }
  void map_flags(const FileDescriptor& file) {
    flags_memory_ =
        memory::MappedMemory::of_file(file.get(), Bytes(), flags_bytes(),
                                      memory::MappedMemory::Access::kReadWrite, "flags of ranks");
    flags_pinned_ = device_->pin(flags_memory_.bytes());
    flags_ = PeerFlags(flags_memory_.bytes(), world_size_);
    buffers_->set_flags(flags_);
    flags_mapped_.store(true);
  }
  Bytes flags_bytes() const {
    return align_up(PeerFlags::bytes_for(world_size_), memory::page_size());
  }
  // The first one counts. `told`: what peers hear after this rank's name.
  void set_failure(std::string message, std::string told) noexcept {
    const std::lock_guard lock(mutex_);
    if (failed_.exchange(true)) return;
    failure_ = std::move(message);
    told_ = std::move(told);
  }
  void stop(std::string message, std::string told) noexcept {
    set_failure(std::move(message), std::move(told));
    flags_.release(rank_);
    pass_on_failure();
  }
  // Tells the peers, once. A rank that ends because another one failed says so before it ends, so
  // that no error names it as the cause.
  void pass_on_failure() noexcept {
    if (std::exchange(passed_on_, true)) return;
    const std::lock_guard lock(mutex_);
    channel_->fail(told_);
    control_->abort(failure_);
  }

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<Collectives> control_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  RankNames names_;
  FileDescriptor flags_file_;  // rank 0's
  memory::MappedMemory flags_memory_;
  std::unique_ptr<device::HostRegistration> flags_pinned_;
  PeerFlags flags_;
  FlagWatch watch_;
  std::shared_ptr<PeerBuffers> buffers_;
  std::uint32_t barriers_ = 0;
  std::uint32_t exchanges_ = 0;
  bool passed_on_ = false;

  std::atomic<bool> failed_ = false;
  std::atomic<bool> flags_mapped_ = false;
  std::mutex mutex_;
  std::string failure_;  // guarded by mutex_, like the next
  std::string told_;
  std::unique_ptr<device::Stream> gathers_;
  std::unique_ptr<device::Stream> contributions_;
  std::unique_ptr<device::Stream> reductions_;
  std::shared_ptr<device::Event> reduced_;  // the last reduction; null: none
  std::unique_ptr<PeerChannel> channel_;    // its thread uses those before it
  std::unique_ptr<PeerMapper> mapper_;      // and its thread those
};

}  // namespace strata::comm
