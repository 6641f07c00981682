#include "strata/device/cuda_kernels.h"

#include <fmt/core.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/device/device.h"
#include "strata/kernels/adam_constants.h"

namespace strata::device {
namespace {

constexpr unsigned kSumBlocks = 192;
constexpr unsigned kCopyBlocks = 264;
constexpr std::int64_t kPack = 4;       // elements that a thread takes at once
constexpr std::int64_t kByte = 8;       // the same, where a byte holds a bit of each
constexpr std::int64_t kChunk = 65536;  // of a sum: strata/kernels/grad_stats.cpp
constexpr unsigned kWarp = 32;

// Arrays whose chunks one kernel takes, in their order.
struct SquareArguments {
  static constexpr int kMost = 128;
  struct Array {
    const float* values;
    std::int64_t numel;
    std::int64_t first_chunk;
  };
  Array at[kMost];
  std::int64_t chunks;
  int count;
};

struct SumArguments {
  const std::byte* sources[Device::kSourcesMax];
  int count;
  float scale;
  int accumulate;
};

// As the kernels declare it.
struct AdamArguments {
  float gradient_scale, decay, l2, lerp_weight, beta2, square_weight, correction2_root, eps,
      negative_step_size;
  int lerp_from_gradient;
  int follows_copies;
  const float* late_scale;
};

AdamArguments arguments_from(const kernels::AdamScalars& scalars, bool follows_copies) {
  const kernels::AdamConstants c(scalars);
  return {c.gradient_scale,
          c.decay,
          c.l2,
          c.lerp_weight,
          c.beta2,
          c.square_weight,
          c.correction2_root,
          c.eps,
          c.negative_step_size,
          c.lerp_from_gradient ? 1 : 0,
          follows_copies ? 1 : 0,
          scalars.late_scale};
}

}  // namespace

CudaKernels::CudaKernels(const CudaModule& module) : module_(module) {
  for (std::size_t to = 0; to < kKernelTypes; ++to) {
    for (std::size_t from = 0; from < kKernelTypes; ++from) {
      const auto pair = fmt::format("{}_{}", kKernelSuffixes[to], kKernelSuffixes[from]);
      cast_[to][from] = module.find("strata_cast_" + pair);
      if (to > 0 && from > 0) accumulate_[to][from] = module.find("strata_accumulate_" + pair);
    }
    if (to > 0) adam_[to] = module.find(fmt::format("strata_adam_{}", kKernelSuffixes[to]));
    remainder_[to] = module.find(fmt::format("strata_remainder_{}", kKernelSuffixes[to]));
    adopt_[to] = module.find(fmt::format("strata_adopt_{}", kKernelSuffixes[to]));
    if (to > 0) sum_in_order_[to] = module.find(fmt::format("strata_sum_{}", kKernelSuffixes[to]));
  }
  scale_ = module.find("strata_scale");
  copy_ = module.find("strata_copy");
  chunk_sums_ = module.find("strata_chunk_sums");
  totals_ = module.find("strata_totals");
  gradient_factor_ = module.find("strata_gradient_factor");
  fingerprints_ = module.find("strata_fingerprints");
  adam_remainder_ = module.find("strata_adam_remainder");
  join_masters_ = module.find("strata_join_masters");
  adam_rounded_ = module.find("strata_adam_rounded_f32");
  adam_rounded16_ = module.find("strata_adam_rounded_bf16");
}

void CudaKernels::cast(std::byte* target, DType target_dtype, const std::byte* source,
                       DType source_dtype, Numel numel, CUstream stream) const {
  require_kernel_types("A cast", 0, target_dtype, source_dtype);
  if (numel.value == 0) return;
  module_.launch(cast_[kernel_place_of(target_dtype)][kernel_place_of(source_dtype)],
                 numel.value / kPack + kPack, stream, target, source, numel.value);
}

void CudaKernels::accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                             DType source_dtype, Numel numel, CUstream stream) const {
  require_kernel_types("Accumulation", 1, target_dtype, source_dtype);
  if (numel.value == 0) return;
  module_.launch(accumulate_[kernel_place_of(target_dtype)][kernel_place_of(source_dtype)],
                 numel.value / kPack + kPack, stream, target, source, numel.value);
}

void CudaKernels::scale(std::span<float> target, std::span<const float> source, float factor,
                        CUstream stream) const {
  STRATA_ASSERT(target.size() == source.size());
  if (target.empty()) return;
  const std::int64_t count = std::ssize(target);
  module_.launch(scale_, count / kPack + kPack, stream, target.data(), source.data(), factor,
                 count);
}

bool CudaKernels::copy(std::span<std::byte> target, std::span<const std::byte> source,
                       CUstream stream) const {
  constexpr std::size_t kBytes = 16;
  const auto aligned = [](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % kBytes == 0;
  };
  if (!aligned(target.data()) || !aligned(source.data()) || target.size() % kBytes != 0)
    return false;
  const auto packs = static_cast<std::int64_t>(target.size() / kBytes);
  if (packs > 0)
    module_.launch_at_most(kCopyBlocks, copy_, packs, stream, target.data(), source.data(), packs);
  return true;
}

void CudaKernels::sum_in_order(std::span<float> target, std::span<const std::byte* const> sources,
                               DType dtype, float scale, bool accumulate, CUstream stream) const {
  require_kernel_types("A sum", 1, dtype, dtype);
  STRATA_ASSERT(!sources.empty() && sources.size() <= Device::kSourcesMax);
  if (target.empty()) return;
  SumArguments sum{{}, static_cast<int>(sources.size()), scale, accumulate ? 1 : 0};
  std::copy(sources.begin(), sources.end(), sum.sources);
  const std::int64_t count = std::ssize(target);
  // Sums come from a link at a tenth of the device's own speed: few blocks keep up with it, and
  // leave room on the processors for the model.
  module_.launch_at_most(kSumBlocks, sum_in_order_[kernel_place_of(dtype)], count / kPack + kPack,
                         stream, target.data(), count, sum);
}

void CudaKernels::fingerprints(std::byte* sums, std::span<const std::byte> bytes, Bytes piece,
                               CUstream stream) const {
  if (bytes.empty()) return;
  // Many, since blocks of a piece add to one place; of a small run fewer, so that the device has
  // enough to do at once.
  constexpr std::int64_t kWordsPerThread = 64;
  constexpr std::int64_t kWordsLeast = 4;
  const std::byte* from = bytes.data();
  auto size = static_cast<std::int64_t>(bytes.size());
  const std::int64_t share = size / 8 / (std::int64_t{CudaModule::kThreads} * module_.blocks_max());
  const std::int64_t words_per_thread = std::clamp(share, kWordsLeast, kWordsPerThread);
  std::int64_t piece_size = piece.value;
  const std::int64_t pieces = (size + piece_size - 1) / piece_size;
  const std::int64_t words = std::min(size, piece_size) / 8 + 1;
  const auto blocks = static_cast<unsigned>(
      std::max<std::int64_t>(1, words / (std::int64_t{CudaModule::kThreads} * words_per_thread)));
  void* arguments[] = {&sums, &from, &size, &piece_size};
  // Pieces lie along x, which holds any number of them.
  module_.launch_grid(fingerprints_, {static_cast<unsigned>(pieces), blocks, CudaModule::kThreads},
                      stream, arguments);
}

std::int64_t CudaKernels::chunks_of(std::span<const std::span<const float>> arrays) {
  std::int64_t chunks = 0;
  for (const auto values : arrays)
    chunks += (static_cast<std::int64_t>(values.size()) + kChunk - 1) / kChunk;
  return chunks;
}

// All arrays in one kernel: one of a few megabytes would not fill the device.
void CudaKernels::sums_of_squares(double* sums, double* chunks,
                                  std::span<const std::span<const float>> arrays,
                                  CUstream stream) const {
  while (!arrays.empty()) {
    const auto here = arrays.first(std::min<std::size_t>(arrays.size(), SquareArguments::kMost));
    SquareArguments taken{};
    for (const auto values : here) {
      taken.at[taken.count++] = {values.data(), static_cast<std::int64_t>(values.size()),
                                 taken.chunks};
      taken.chunks += chunks_of({&values, 1});
    }
    if (taken.chunks > 0) module_.launch(chunk_sums_, taken.chunks * kWarp, stream, chunks, taken);
    void* arguments[] = {&sums, &chunks, &taken};
    module_.launch_grid(totals_, {static_cast<unsigned>(taken.count), 1, kWarp}, stream, arguments);
    sums += taken.count;
    chunks += taken.chunks;
    arrays = arrays.subspan(here.size());
  }
}

void CudaKernels::gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                                  double loss_scale, double clipping, CUstream stream) const {
  kernels::GradientFactor* target = &result;
  const double* from = sums.data();
  auto count = static_cast<std::int64_t>(sums.size());
  void* arguments[] = {&target, &from, &count, &loss_scale, &clipping};
  module_.launch_grid(gradient_factor_, {1, 1, kWarp}, stream, arguments);
}

void CudaKernels::adam(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
                       CUstream stream) const {
  kernels::check_adam(spans, scalars);
  const std::int64_t count = std::ssize(spans.gradient);
  if (count == 0) return;
  const AdamArguments constants = arguments_from(scalars, spans.follows_weight16);
  const std::int64_t threads = count / kPack + kPack;
  float* const exp_avg = spans.exp_avg.data();
  float* const exp_avg_sq = spans.exp_avg_sq.data();
  const float* const gradient = spans.gradient.data();
  std::byte* const copy = spans.weight16;
  if (spans.has_remainder()) {
    module_.launch(adam_remainder_, count / kByte + 1, stream, copy, spans.remainder, exp_avg,
                   exp_avg_sq, gradient, count, constants);
  } else if (spans.has_moments16()) {
    module_.launch(adam_rounded16_, threads, stream, copy, spans.moments16.exp_avg,
                   spans.moments16.exp_avg_sq, gradient, count, constants);
  } else if (spans.rounds_weight16) {
    module_.launch(adam_rounded_, threads, stream, copy, exp_avg, exp_avg_sq, gradient, count,
                   constants);
  } else {
    const DType dtype = copy == nullptr ? DType::kFloat32 : spans.weight16_dtype;
    module_.launch(adam_[kernel_place_of(dtype)], threads, stream, spans.weight.data(), exp_avg,
                   exp_avg_sq, gradient, copy, count, constants);
  }
}

void CudaKernels::store_remainder(const kernels::MasterRemainder& target, Numel first,
                                  const std::byte* source, DType source_dtype, Numel numel,
                                  CUstream stream) const {
  require_kernel_types("A remainder", 0, DType::kBFloat16, source_dtype);
  if (numel.value == 0) return;
  module_.launch(remainder_[kernel_place_of(source_dtype)], numel.value / kByte + 2, stream, target,
                 first.value, source, numel.value);
}

void CudaKernels::join_masters(std::span<float> masters, const std::byte* weights,
                               const kernels::MasterRemainder& remainder, Numel first,
                               CUstream stream) const {
  if (masters.empty()) return;
  const std::int64_t count = std::ssize(masters);
  module_.launch(join_masters_, count, stream, masters.data(), weights, remainder, first.value,
                 count);
}

void CudaKernels::adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                                CUstream stream) const {
  require_kernel_types("A cast", 0, DType::kFloat32, dtype);
  if (masters.empty()) return;
  const std::int64_t count = std::ssize(masters);
  module_.launch(adopt_[kernel_place_of(dtype)], count / kPack + kPack, stream, masters.data(),
                 weights, count);
}

}  // namespace strata::device
