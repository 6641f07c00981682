// Bases of classes that are never copied or moved: NonCopyable for those that own a resource in
// place, Interface for contracts that others implement, which are destroyed through a pointer to
// it.
#pragma once

namespace strata {

class NonCopyable {
 public:
  NonCopyable(const NonCopyable&) = delete;
  NonCopyable& operator=(const NonCopyable&) = delete;

 protected:
  NonCopyable() = default;
  ~NonCopyable() = default;
};

class Interface : public NonCopyable {
 public:
  virtual ~Interface() = default;
};

}  // namespace strata
