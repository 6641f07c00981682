// Memory of one rank under a name that no other living buffer of the rank has. Threads: one thread
// a rank; the destructor may run in any. Ownership: owns the memory, shares the names.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>

#include "strata/comm/collectives.h"

namespace strata::torch {

// The names of one rank's living buffers, which any thread may destroy.
struct BufferNames {
  std::mutex mutex;
  std::set<std::string> living;
};

struct BufferActions {
  std::function<void(Bytes)> back = nullptr;    // the action of SharedBuffer::back()
  std::function<void()> before_free = nullptr;  // runs before the memory goes
  std::function<void()> release = nullptr;      // SharedBuffer::release(); null: not releasable
};

class NamedBuffer final : public comm::SharedBuffer {
 public:
  // `owner` keeps `memory`. UsageError: the name is in use.
  NamedBuffer(std::string name, std::shared_ptr<BufferNames> names, std::shared_ptr<void> owner,
              std::span<std::byte> memory, BufferActions actions = {});
  ~NamedBuffer() override;
  NamedBuffer(const NamedBuffer&) = delete;
  NamedBuffer& operator=(const NamedBuffer&) = delete;

  std::span<std::byte> local() override { return memory_; }
  const std::string& name() const override { return name_; }
  void back(Bytes bytes) override;
  bool releasable() const override { return actions_.release != nullptr; }
  void release() override;

 private:
  std::string name_;
  std::shared_ptr<BufferNames> names_;
  std::shared_ptr<void> owner_;
  std::span<std::byte> memory_;
  BufferActions actions_;
};

}  // namespace strata::torch
