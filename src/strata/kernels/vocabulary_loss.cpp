#include "strata/kernels/vocabulary_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise_loops.h"

namespace strata::kernels {
namespace {

float capped(const VocabularyRows& of, float logit) {
  const float scaled = of.scale * logit;
  return of.softcap == 0.0F ? scaled : of.softcap * std::tanh(scaled / of.softcap);
}

// The derivative of capped() where it has this value.
float slope_at(const VocabularyRows& of, float value) {
  if (of.softcap == 0.0F) return of.scale;
  const float part = value / of.softcap;
  return of.scale * (1.0F - part * part);
}

// The value of each logit of a row, and a logit's new content.
template <typename Storage>
class Row {
 public:
  Row(const VocabularyRows& of, std::int64_t row)
      : of_(of), first_(static_cast<std::size_t>(row * of.columns)) {}

  float operator[](std::size_t column) const {
    return capped(of_, load_element<Storage>(of_.logits, first_ + column));
  }
  void set(std::size_t column, float value) const {
    store_element<Storage>(of_.logits, first_ + column, value);
  }

 private:
  const VocabularyRows& of_;
  std::size_t first_;
};

template <typename Storage>
void one_row(const VocabularyRows& of, std::int64_t index) {
  const Row<Storage> row(of, index);
  const auto columns = static_cast<std::size_t>(of.columns);
  const std::int64_t label = of.labels[index];
  if (label == of.ignored) {
    of.losses[index] = 0.0F;
    for (std::size_t i = 0; of.gradients && i < columns; ++i) row.set(i, 0.0F);
    return;
  }
  float top = -std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i < columns; ++i) {
    if (!(row[i] <= top)) top = row[i];  // a NaN, too
  }
  double sum = 0.0;
  for (std::size_t i = 0; i < columns; ++i) sum += static_cast<double>(std::exp(row[i] - top));
  const float of_all = top + static_cast<float>(std::log(sum));
  const bool known = label >= 0 && label < of.columns;
  of.losses[index] = known ? of_all - row[static_cast<std::size_t>(label)]
                           : std::numeric_limits<float>::quiet_NaN();
  for (std::size_t i = 0; of.gradients && i < columns; ++i) {
    const float less = row[i] - of_all;
    const bool labelled = known && i == static_cast<std::size_t>(label);
    row.set(i, (labelled ? std::expm1(less) : std::exp(less)) * slope_at(of, row[i]));
  }
}

}  // namespace

void vocabulary_losses(const VocabularyRows& rows, ThreadPool* pool) {
  const bool known = with_storage(rows.dtype, [&](auto storage) {
    for_chunks(pool, rows.rows, 1, [&](std::int64_t begin, std::int64_t end) {
      for (; begin < end; ++begin) one_row<decltype(storage)>(rows, begin);
    });
  });
  STRATA_ASSERT(known);
}

}  // namespace strata::kernels
