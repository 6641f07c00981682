// The cross-entropy of rows of logits, and its gradient by them in their own memory.
// Threads: a pure function of its rows, which it splits over `pool` when one is given. Errors:
// none; the dtype is fp32, bf16 or fp16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// A row of [rows, columns] logits, one behind the other, is a token; a column is an entry of the
// vocabulary. The loss is that of z = scale * logit, or with a softcap of
// z = softcap * tanh(scale * logit / softcap).
struct VocabularyRows {
  std::byte* logits = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  const std::int64_t* labels = nullptr;  // [rows], the column of each
  std::int64_t ignored = -100;           // a label of tokens without a loss: 0, and gradients of 0
  float* losses = nullptr;  // [rows], written; NaN for another label beyond the columns
  float scale = 1.0F;
  float softcap = 0.0F;    // 0: none
  bool gradients = false;  // each logit becomes the derivative of its row's loss by it
};

// In fp32. The order of sums, and the last bits, are each device's own.
void vocabulary_losses(const VocabularyRows& rows, ThreadPool* pool);

}  // namespace strata::kernels
