#include "strata/comm/peer/peer_link.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {
namespace {

constexpr std::string_view kFlagsKey = "flags";
constexpr std::chrono::microseconds kAskAgainAfter(200);

std::string failed_because(std::string_view reason) {
  return fmt::format("failed: {}", reason);
}

}  // namespace

PeerLink::PeerLink(std::shared_ptr<device::Device> device, std::shared_ptr<Collectives> control,
                   const PeerOptions& options)
    : device_(std::move(device)),
      control_(std::move(control)),
      rank_(control_->rank()),
      world_size_(control_->world_size()),
      timeout_(options.timeout),
      names_(options.names),
      watch_(timeout_),
      buffers_(std::make_shared<PeerBuffers>(device_, rank_)),
      transfers_(device_->create_stream()) {
  std::string error;
  // Rank 0 pins before it shares: to pin may migrate pages, which fails while others pin them.
  if (rank_ == 0) error = error_of([this] { map_flags(make_flags_file()); });
  channel_ = std::make_unique<PeerChannel>(*control_, *this, timeout_, names_);
  if (rank_ != 0) error = error_of([this] { map_flags(ask_for_flags_file()); });
  agree_all_can(control_->all_gather_text(error), "share memory with the others", names_);
  buffers_->set_before_unmap([this] {
    transfers_->synchronize();
    device_->compute_stream().synchronize();
  });
  mapper_ = std::make_unique<PeerMapper>(*buffers_, *channel_, rank_, world_size_);
}

PeerLink::~PeerLink() {
  if (failed_.load()) pass_on_failure();
  channel_->stop_asking();
  mapper_.reset();
  channel_.reset();  // its thread answers peers about the buffers
  buffers_->end_sharing();
}

FileDescriptor PeerLink::make_flags_file() {
  const Bytes bytes = flags_bytes();
  FileDescriptor file(::memfd_create("strata-flags", MFD_CLOEXEC));
  if (!file.valid() || ::ftruncate(file.get(), bytes.value) != 0)
    throw CommError(fmt::format("no shared memory of {}: {}", to_string(bytes), errno_text(errno)));
  flags_file_ = FileDescriptor(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0));
  return file;
}

FileDescriptor PeerLink::ask_for_flags_file() {
  std::optional<SharedParts> parts = channel_->ask(0, std::string(kFlagsKey), 0);
  if (!parts || parts->pieces.empty())
    throw CommError("the first rank has no shared memory to give");
  return std::move(parts->pieces.front().descriptor);
}

void PeerLink::map_flags(FileDescriptor file) {
  flags_memory_ =
      memory::MappedMemory::of_file(file.get(), Bytes(), flags_bytes(),
                                    memory::MappedMemory::Access::kReadWrite, "flags of ranks");
  flags_pinned_ = device_->pin(flags_memory_.bytes());
  flags_ = PeerFlags(flags_memory_.bytes(), world_size_);
  buffers_->set_flags(flags_);
  flags_mapped_.store(true);
}

Bytes PeerLink::flags_bytes() const {
  return align_up(PeerFlags::bytes_for(world_size_), memory::page_size());
}

std::optional<SharedParts> PeerLink::share(const std::string& key, std::size_t first) {
  if (key != kFlagsKey) return buffers_->share(key, first);
  if (!flags_file_.valid()) return std::nullopt;
  SharedParts parts;
  parts.pieces.push_back(
      {FileDescriptor(::fcntl(flags_file_.get(), F_DUPFD_CLOEXEC, 0)), Bytes(), Bytes()});
  return parts;
}

void PeerLink::failed(const std::string& message) noexcept {
  try {
    set_failure(message, failed_because(message));
  } catch (const std::exception&) {  // no memory for the words
    set_failure("a rank failed", "failed");
  }
  if (flags_mapped_.load()) flags_.release(rank_);
}

void PeerLink::set_failure(std::string message, std::string told) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_.exchange(true)) return;
  failure_ = std::move(message);
  told_ = std::move(told);
}

void PeerLink::require_usable() {
  if (!failed_.load()) return;
  pass_on_failure();
  const std::lock_guard lock(mutex_);
  throw CommError(failure_);
}

void PeerLink::pass_on_failure() noexcept {
  if (std::exchange(passed_on_, true)) return;
  const std::lock_guard lock(mutex_);
  channel_->fail(told_);
  control_->abort(failure_);
}

void PeerLink::stop(std::string message, std::string told) noexcept {
  set_failure(std::move(message), std::move(told));
  flags_.release(rank_);
  pass_on_failure();
}

void PeerLink::end(Ending ending, std::string_view reason) noexcept {
  control_->end(ending, reason);
  try {
    std::string told = fmt::format("{}: {}", ending == Ending::kLeft ? "left" : "gave up", reason);
    stop(fmt::format("rank {} {}", names_.of(rank_), told), told);
  } catch (const std::exception&) {  // no memory for the words
    stop("a rank gave up", "gave up");
  }
}

void PeerLink::fail(const std::string& message) {
  // A peer that ended may show here before its own words arrive.
  if (!failed_.load()) stop(message, failed_because(message));
  const std::lock_guard lock(mutex_);
  throw CommError(failure_);
}

const std::byte* PeerLink::reach(int rank, const std::string& key, std::string_view name,
                                 Bytes offset, Bytes bytes, std::string_view what) {
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
          "{}: the slice of rank {} lies outside its buffer '{}'; every rank must allocate it for "
          "the same layout (offset {}, slice of {} B, buffer of {} B)",
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

void PeerLink::map_ahead(const SharedBuffer& buffer) {
  mapper_->map_ahead(buffer.name(), *buffers_->number_of(buffer));
}

void PeerLink::map_from_all(const std::string& name, Bytes bytes) {
  for (int turn = 0; turn < peers(); ++turn) {
    const auto view = buffers_->find(*channel_, peer(turn), PeerBuffers::key_of_name(name), bytes);
    if (!view || view->mapped < bytes)
      throw CommError(fmt::format("rank {} does not share '{}'", names_.of(peer(turn)), name));
  }
}

void PeerLink::unmap_freed() {
  controlled("unmapping what was freed", [&] { buffers_->unmap_freed(*channel_, world_size_); });
}

std::vector<std::uint64_t> PeerLink::agree_on_operation(const std::string& what,
                                                        std::uint64_t number) {
  return controlled(what,
                    [&] { return comm::agree_on_operation(*control_, what, names_, number); });
}

void PeerLink::barrier() {
  agree_on_operation("barrier");
  ++barriers_;
  device::Stream& compute = device_->compute_stream();
  if (reduced_ != nullptr) compute.wait_for(*reduced_);
  // Gathers from before the barrier may still run: updates behind the barrier do not wait for them.
  for (int turn = 0; turn < peers(); ++turn) {
    device_->write_flag(flag(PeerFlags::Kind::kBarrier, rank_, peer(turn)), barriers_, compute);
    device_->write_flag(flag(PeerFlags::Kind::kGathered, rank_, peer(turn)), barriers_,
                        *transfers_);
  }
  for (int turn = 0; turn < peers(); ++turn)
    wait_for(PeerFlags::Kind::kBarrier, peer(turn), barriers_, *transfers_);
  require_usable();
}

void PeerLink::exchange(std::span<std::byte> all, std::span<const std::byte> mine) {
  if (mine.size() > Collectives::kOnDeviceMost ||
      all.size() != mine.size() * static_cast<std::size_t>(world_size_)) {
    throw UsageError(fmt::format(
        "an exchange on devices takes at most {} B of each rank, and gives all of them; found {} B "
        "given and {} B wanted on {} ranks",
        Collectives::kOnDeviceMost, mine.size(), all.size(), world_size_));
  }
  agree_on_operation(fmt::format("exchange of {} B", mine.size()));
  ++exchanges_;
  device::Stream& compute = device_->compute_stream();
  compute.wait_for(*transfers_->record());
  const std::span<std::byte> values = flags_.values(exchanges_);
  const auto line_of = [&](int rank) {
    return values.subspan(static_cast<std::size_t>(rank) * PeerFlags::kLine, mine.size());
  };
  device_->copy(line_of(rank_), mine, compute);
  for (int turn = 0; turn < peers(); ++turn)
    device_->write_flag(flag(PeerFlags::Kind::kGiven, rank_, peer(turn)), exchanges_, compute);
  for (int turn = 0; turn < peers(); ++turn)
    wait_for(PeerFlags::Kind::kGiven, peer(turn), exchanges_, compute);
  require_usable();
  for (int r = 0; r < world_size_; ++r)
    device_->copy(all.subspan(mine.size() * std::size_t(r), mine.size()), line_of(r), compute);
}

void PeerLink::wait_for_readers() noexcept {
  try {
    for (int turn = 0; turn < peers(); ++turn)
      wait_for(PeerFlags::Kind::kGathered, peer(turn), barriers_, *transfers_);
    transfers_->synchronize();
    device_->compute_stream().synchronize();
  } catch (const std::exception&) {
    return;  // a device that is lost runs nothing
  }
}

}  // namespace strata::comm
