#include "strata/comm/peer/peer_mapper.h"

#include <chrono>
#include <exception>
#include <utility>

namespace strata::comm {
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
