#include "strata/engine/reduce/held_gradients.h"

#include <algorithm>
#include <utility>

namespace strata::engine {

void HeldGradients::hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader) {
  if (owner == nullptr) {
    device_.compute_stream().wait_for(*reader.record());
    return;
  }
  let_go(std::max(most_ - bytes, Bytes()));
  held_.push_back({std::move(owner), bytes, reader.record()});
  bytes_ += bytes;
}

void HeldGradients::let_go(Bytes most) {
  while (!held_.empty() && bytes_ > most) {
    device_.compute_stream().wait_for(*held_.front().read);
    bytes_ -= held_.front().bytes;
    held_.pop_front();
  }
}

void HeldGradients::forget() {
  held_.clear();
  bytes_ = Bytes();
}

}  // namespace strata::engine
