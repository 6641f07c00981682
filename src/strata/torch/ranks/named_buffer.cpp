#include "strata/torch/ranks/named_buffer.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::torch {

NamedBuffer::NamedBuffer(std::string name, std::shared_ptr<BufferNames> names,
                         std::shared_ptr<void> owner, std::span<std::byte> memory,
                         BufferActions actions)
    : name_(std::move(name)),
      names_(std::move(names)),
      owner_(std::move(owner)),
      memory_(memory),
      actions_(std::move(actions)) {
  const std::lock_guard lock(names_->mutex);
  if (!names_->living.insert(name_).second) {
    throw UsageError(fmt::format("a buffer named '{}' exists already; names are unique", name_));
  }
}

NamedBuffer::~NamedBuffer() {
  if (actions_.before_free) actions_.before_free();
  const std::lock_guard lock(names_->mutex);
  names_->living.erase(name_);
}

void NamedBuffer::back(Bytes bytes) {
  if (actions_.back) actions_.back(bytes);
}

void NamedBuffer::release() {
  if (actions_.before_free) actions_.before_free();
  if (actions_.release) actions_.release();
}

}  // namespace strata::torch
