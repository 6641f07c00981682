#include "strata/memory/byte_budget.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::memory {

ByteBudget::Hold::Hold(std::shared_ptr<ByteBudget> budget, Bytes bytes)
    : budget_(std::move(budget)), bytes_(bytes) {}

ByteBudget::Hold::Hold(Hold&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)),
      bytes_(std::exchange(other.bytes_, Bytes())) {}

ByteBudget::Hold& ByteBudget::Hold::operator=(Hold&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  budget_ = std::exchange(other.budget_, nullptr);
  bytes_ = std::exchange(other.bytes_, Bytes());
  return *this;
}

ByteBudget::Hold::~Hold() {
  give_back();
}

void ByteBudget::Hold::give_back() noexcept {
  if (!budget_) return;
  const std::lock_guard lock(budget_->mutex_);
  budget_->left_ += bytes_;
}

std::shared_ptr<ByteBudget> ByteBudget::create(Bytes limit) {
  STRATA_ASSERT(limit.value >= 0);
  return std::shared_ptr<ByteBudget>(new ByteBudget(limit));
}

std::optional<ByteBudget::Hold> ByteBudget::take(Bytes bytes) {
  STRATA_ASSERT(bytes.value >= 0);
  const std::lock_guard lock(mutex_);
  if (bytes > left_) return std::nullopt;
  left_ -= bytes;
  return Hold(shared_from_this(), bytes);
}

Bytes ByteBudget::left() const {
  const std::lock_guard lock(mutex_);
  return left_;
}

}  // namespace strata::memory
