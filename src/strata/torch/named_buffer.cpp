#include "strata/torch/named_buffer.h"

#include <fmt/format.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::torch {

NamedBuffer::NamedBuffer(std::string name, std::shared_ptr<BufferNames> names,
                         std::shared_ptr<void> owner, std::span<std::byte> memory,
                         std::function<void()> before_free)
    : name_(std::move(name)),
      names_(std::move(names)),
      owner_(std::move(owner)),
      memory_(memory),
      before_free_(std::move(before_free)) {
  if (!names_->insert(name_).second) {
    throw UsageError(fmt::format("a buffer named '{}' exists already; names are unique", name_));
  }
}

NamedBuffer::~NamedBuffer() {
  if (before_free_) before_free_();
  names_->erase(name_);
}

}  // namespace strata::torch
