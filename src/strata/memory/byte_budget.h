// A number of bytes that holders share: each takes a part, and its destructor gives it back. Bounds
// the bytes of a device or a store, even if the system has more.
// Threads: internally synchronised. Ownership: a Hold keeps its budget alive. Errors: none; take()
// returns nullopt if the bytes do not fit, and the caller writes the message.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "strata/base/units.h"

namespace strata::memory {

class ByteBudget : public std::enable_shared_from_this<ByteBudget> {
 public:
  // Bytes taken; given back by the destructor. Movable.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept;
    Hold& operator=(Hold&& other) noexcept;
    ~Hold();
    Bytes bytes() const { return bytes_; }

   private:
    friend class ByteBudget;
    Hold(std::shared_ptr<ByteBudget> budget, Bytes bytes);
    void give_back() noexcept;

    std::shared_ptr<ByteBudget> budget_;
    Bytes bytes_;
  };

  static std::shared_ptr<ByteBudget> create(Bytes limit);

  std::optional<Hold> take(Bytes bytes);
  Bytes limit() const { return limit_; }
  Bytes left() const;

 private:
  explicit ByteBudget(Bytes limit) : limit_(limit), left_(limit) {}

  const Bytes limit_;
  mutable std::mutex mutex_;
  Bytes left_;  // guarded by mutex_
};

}  // namespace strata::memory
