#include "strata/comm/peer/peer_buffers.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <utility>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

constexpr Bytes kAll(std::numeric_limits<std::int64_t>::max());
constexpr std::size_t kNoPieces = std::numeric_limits<std::size_t>::max();

}  // namespace

class PeerBuffers::Buffer final : public SharedBuffer {
 public:
  Buffer(std::shared_ptr<PeerBuffers> owner, std::string name, Bytes bytes,
         std::unique_ptr<device::GrowableMemory> memory)
      : owner_(std::move(owner)),
        name_(std::move(name)),
        bytes_(bytes),
        memory_(std::move(memory)) {
    const std::lock_guard lock(owner_->mutex_);
    number_ = owner_->next_number_++;
    if (!owner_->living_.emplace(name_, this).second) {
      throw UsageError(fmt::format("a buffer named '{}' exists already; names are unique", name_));
    }
  }

  ~Buffer() override {
    if (owner_->before_free_) owner_->before_free_();
    const std::lock_guard lock(owner_->mutex_);
    owner_->living_.erase(name_);
    owner_->count_freed();
  }

  std::span<std::byte> local() override { return {memory_->base(), bytes_.size()}; }
  const std::string& name() const override { return name_; }

  void back(Bytes bytes) override {
    const std::lock_guard lock(owner_->mutex_);
    memory_->grow_to(bytes);
  }

  bool releasable() const override { return true; }
  // To peers it is another buffer of this name from now on, whose pieces they map anew.
  void release() override {
    if (owner_->before_free_) owner_->before_free_();
    const std::lock_guard lock(owner_->mutex_);
    memory_->release();
    number_ = owner_->next_number_++;
    owner_->count_freed();
  }

  std::uint64_t number() const { return number_; }

  // The mutex is held.
  SharedParts parts(std::size_t first) const {
    SharedParts result{number_, bytes_, memory_->reserved(), {}};
    for (std::size_t i = first; i < memory_->pieces(); ++i) {
      result.pieces.push_back(memory_->piece(i));
    }
    return result;
  }

 private:
  std::shared_ptr<PeerBuffers> owner_;
  std::string name_;
  Bytes bytes_;
  std::unique_ptr<device::GrowableMemory> memory_;
  std::uint64_t number_ = 0;
};

PeerBuffers::PeerBuffers(std::shared_ptr<device::Device> device, int rank)
    : device_(std::move(device)), rank_(rank) {}

std::unique_ptr<SharedBuffer> PeerBuffers::allocate(const std::shared_ptr<PeerBuffers>& buffers,
                                                    std::string name, Bytes bytes, bool growing) {
  // The device is the collectives' own, so its ledger is never read, and the kind does not matter.
  auto memory = buffers->device_->reserve_shared(bytes, memory::Kind::kWeights);
  if (!growing) memory->grow_to(bytes);
  return std::make_unique<Buffer>(buffers, std::move(name), bytes, std::move(memory));
}

void PeerBuffers::count_freed() {
  if (flags_) flags_->freed(rank_).fetch_add(1);
}

void PeerBuffers::end_sharing() {
  before_unmap_ = {};
  const std::lock_guard lock(mutex_);
  flags_.reset();
}

std::optional<SharedParts> PeerBuffers::share(const std::string& key, std::size_t first) {
  if (key.empty()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const std::string rest = key.substr(1);
  if (key[0] == 'n') {
    const auto found = living_.find(rest);
    if (found == living_.end()) return std::nullopt;
    return found->second->parts(first);
  }
  for (const auto& [name, buffer] : living_) {
    if (std::to_string(buffer->number()) == rest) return buffer->parts(first);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> PeerBuffers::number_of(const SharedBuffer& buffer) const {
  const std::lock_guard lock(mutex_);
  const auto found = living_.find(buffer.name());
  if (found == living_.end() || found->second != &buffer) return std::nullopt;
  return found->second->number();
}

bool PeerBuffers::lives(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(living_,
                             [&](const auto& each) { return each.second->number() == number; });
}

std::optional<PeerBuffers::View> PeerBuffers::find(PeerChannel& channel, int rank,
                                                   const std::string& key, Bytes needed) {
  const std::lock_guard lock(mapping_mutex_);
  unmap_gone();
  return look(channel, Place(rank, key), needed, /*unmaps=*/true);
}

std::optional<PeerBuffers::View> PeerBuffers::find_ahead(PeerChannel& channel, int rank,
                                                         const std::string& key) {
  const std::lock_guard lock(mapping_mutex_);
  return look(channel, Place(rank, key), kAll, /*unmaps=*/false);
}

// After a failure peers free their buffers while this rank may still read them.
void PeerBuffers::unmap_gone() {
  const auto gone = [](const auto& each) { return each.second.gone; };
  if (std::ranges::none_of(mappings_, gone)) return;
  if (before_unmap_) before_unmap_();
  std::erase_if(mappings_, gone);
}

std::optional<PeerBuffers::View> PeerBuffers::look(PeerChannel& channel, const Place& place,
                                                   Bytes needed, bool unmaps) {
  const auto& [rank, key] = place;
  auto known = mappings_.find(place);
  const std::uint32_t freed = flags_->freed(rank).load();
  while (known == mappings_.end() || known->second.pieces->mapped() < needed ||
         known->second.freed != freed) {
    const bool is_new = known == mappings_.end();
    std::optional<SharedParts> parts =
        channel.ask(rank, key, is_new ? 0 : known->second.pieces->pieces());
    if (!is_new && (!parts || parts->number != known->second.number)) {
      known->second.gone = true;
      if (!unmaps) return std::nullopt;
      unmap_gone();
      known = mappings_.end();
      if (parts) continue;  // another buffer of that name: from its first piece on
    }
    if (!parts) return std::nullopt;
    if (is_new) {
      Mapping mapping{parts->number, freed, parts->bytes,
                      device_->reserve_mapping(parts->reserved)};
      known = mappings_.emplace(place, std::move(mapping)).first;
    }
    known->second.freed = freed;
    const bool more = !parts->pieces.empty();
    for (device::SharedHandle& piece : parts->pieces) known->second.pieces->add(std::move(piece));
    if (!more) break;
  }
  return View{known->second.pieces->base(), known->second.bytes, known->second.pieces->mapped()};
}

void PeerBuffers::unmap_freed(PeerChannel& channel, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank != rank_) note_freed(channel, rank);
  }
  const std::lock_guard lock(mapping_mutex_);
  unmap_gone();
}

bool PeerBuffers::may_be_freed(int rank) const {
  const std::lock_guard lock(mapping_mutex_);
  const auto looked = looked_.find(rank);
  return flags_->freed(rank).load() != (looked == looked_.end() ? 0 : looked->second);
}

void PeerBuffers::note_freed(PeerChannel& channel, int rank) {
  const std::uint32_t freed = flags_->freed(rank).load();
  std::optional<Place> last;  // the lock is free between two questions, so that others may ask
  for (;;) {
    const std::lock_guard lock(mapping_mutex_);
    const auto next = last ? mappings_.upper_bound(*last) : mappings_.lower_bound(Place(rank, ""));
    if (next == mappings_.end() || next->first.first != rank) {
      looked_[rank] = freed;
      return;
    }
    last = next->first;
    const std::optional<SharedParts> parts = channel.ask(rank, last->second, kNoPieces);
    if (!parts || parts->number != next->second.number) next->second.gone = true;
  }
}

namespace {

// Between two looks at buffers that grow: about what a piece of memory takes to make.
constexpr std::chrono::milliseconds kLookAgain(2);
// Between two looks for freed buffers: each asks for all that is mapped.
constexpr std::chrono::milliseconds kLookForFreedAgain(50);

}  // namespace

PeerMapper::PeerMapper(PeerBuffers& buffers, PeerChannel& channel, int rank, int world_size)
    : buffers_(buffers), channel_(channel) {
  for (int turn = 1; turn < world_size; ++turn) peers_.push_back((rank + turn) % world_size);
  if (!peers_.empty()) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

PeerMapper::~PeerMapper() = default;

void PeerMapper::map_ahead(std::string name, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  growing_.push_back({std::move(name), number});
  wanted_.notify_one();
}

void PeerMapper::look_for_freed() {
  const std::lock_guard lock(mutex_);
  looks_ = true;
  wanted_.notify_one();
}

void PeerMapper::run(const std::stop_token& stop) {
  std::chrono::steady_clock::time_point next_look;
  std::unique_lock lock(mutex_);
  while (wanted_.wait(lock, stop, [this] { return looks_ || !growing_.empty(); })) {
    const auto now = std::chrono::steady_clock::now();
    const bool looks = now >= next_look && std::exchange(looks_, false);
    if (looks) next_look = now + kLookForFreedAgain;
    std::vector<Buffer> growing = std::exchange(growing_, {});
    lock.unlock();
    if (looks) note_freed();
    std::erase_if(growing, [this](const Buffer& buffer) { return map(buffer); });
    lock.lock();
    growing_.insert(growing_.end(), growing.begin(), growing.end());
    wanted_.wait_for(lock, stop, kLookAgain, [] { return false; });
  }
}

bool PeerMapper::map(const Buffer& buffer) const {
  const std::string key = PeerBuffers::key_of_name(buffer.name);
  bool complete = true;
  try {
    if (!buffers_.lives(buffer.number)) return true;
    for (const int peer : peers_) {
      const auto view = buffers_.find_ahead(channel_, peer, key);
      complete = complete && view && view->mapped >= view->bytes;
    }
  } catch (const std::exception&) {
    return true;
  }
  return complete;
}

void PeerMapper::note_freed() const {
  for (const int peer : peers_) {
    try {
      buffers_.note_freed(channel_, peer);
    } catch (const std::exception&) {
      continue;  // it has ended, or does not answer
    }
  }
}

}  // namespace strata::comm
