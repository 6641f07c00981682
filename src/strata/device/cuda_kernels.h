// The part of the CUDA device that runs the kernels of cuda_kernels.cu.
// Threads, order: device.h. Memory: of the device, or pinned. Errors: UsageError for element types
// that a kernel does not have; DeviceError.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/device/cuda_driver.h"
#include "strata/kernels/update_constants.h"

namespace strata::device {

inline constexpr unsigned kSumBlocks = 192;
inline constexpr unsigned kCopyBlocks = 264;
// Blocks of an update over a link: so few keep it busy, and more of them make it slower.
inline constexpr unsigned kFarBlocks = 24;
// Blocks of each processor in an update with states of 8 bits.
inline constexpr unsigned kBlocks8 = 4;
inline constexpr std::int64_t kPack = 4;       // elements that a thread takes at once
inline constexpr std::int64_t kByte = 8;       // the same, where a byte holds a bit of each
inline constexpr std::int64_t kChunk = 65536;  // of a sum: strata/kernels/grad_stats.cpp
inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kLossThreads = 1024;  // of a row of logits
inline constexpr std::int64_t kLossBlocks = 65536;

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
struct UpdateArguments {
  kernels::UpdateConstants constants;
  int follows_copies;
  const float* late_scale;
};
static_assert(sizeof(kernels::UpdateConstants) == 44 && sizeof(UpdateArguments) == 56);

struct MapArguments {
  kernels::Map8 exp_avg = kernels::signed_map8();
  kernels::Map8 exp_avg_sq = kernels::unsigned_map8();
  int keeps_positive = 1;
};

static_assert(sizeof(kernels::VocabularyRows) == 72);

struct GradientArguments {
  const float* wide;
  const std::byte* narrow;
};

class CudaKernels : public Device {
 public:
  explicit CudaKernels(std::shared_ptr<const CudaContext> context) : module_(std::move(context)) {}

  void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
            Numel numel, Stream& stream) override {
    if (target_dtype == source_dtype && is_floating(target_dtype)) {
      const std::size_t bytes = bytes_of(numel, target_dtype).size();
      if (copy_by_kernel({target, bytes}, {source, bytes}, CudaStream::handle_of(stream))) return;
      return copy({target, bytes}, {source, bytes}, stream);
    }
    require_kernel_types("A cast", 0, target_dtype, source_dtype);
    if (numel.value == 0) return;
    module_.launch(cast_[kernel_place_of(target_dtype)][kernel_place_of(source_dtype)],
                   numel.value / kPack + kPack, CudaStream::handle_of(stream), target, source,
                   numel.value);
  }
  void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                  DType source_dtype, Numel numel, Stream& stream) override {
    require_kernel_types("Accumulation", 1, target_dtype, source_dtype);
    if (numel.value == 0) return;
    module_.launch(accumulate_[kernel_place_of(target_dtype)][kernel_place_of(source_dtype)],
                   numel.value / kPack + kPack, CudaStream::handle_of(stream), target, source,
                   numel.value);
  }
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, Stream& stream) override {
    require_kernel_types("A sum", 1, dtype, dtype);
    STRATA_ASSERT(!sources.empty() && sources.size() <= Device::kSourcesMax);
    if (target.empty()) return;
    SumArguments sum{{}, static_cast<int>(sources.size()), scale, accumulate ? 1 : 0};
    std::copy(sources.begin(), sources.end(), sum.sources);
    const std::int64_t count = std::ssize(target);
    // Sums come from a link at a tenth of the device's own speed: few blocks keep up with it, and
    // leave room on the processors for the model.
    module_.launch_at_most(kSumBlocks, sum_in_order_[kernel_place_of(dtype)], count / kPack + kPack,
                           CudaStream::handle_of(stream), target.data(), count, sum);
  }
  void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                       double loss_scale, double clipping, Stream& stream) override {
    module_.launch_grid(gradient_factor_, {1, 1, kWarp}, CudaStream::handle_of(stream), &result,
                        sums.data(), std::int64_t{std::ssize(sums)}, loss_scale, clipping);
  }
  void vocabulary_losses(const kernels::VocabularyRows& rows, Stream& stream) override {
    require_kernel_types("A vocabulary's loss", 1, rows.dtype, rows.dtype);
    if (rows.rows == 0) return;
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(rows.rows, kLossBlocks));
    module_.launch_grid(losses_[kernel_place_of(rows.dtype)], {blocks, 1, kLossThreads},
                        CudaStream::handle_of(stream), rows);
  }
  // The update and its masters: cuda_update.cuh, cuda_update8.cuh.
  void update_step(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                   Stream& on) override {
    CUstream const stream = CudaStream::handle_of(on);
    kernels::check_update(spans, scalars);
    const auto count = static_cast<std::int64_t>(spans.numel());
    if (count == 0) return;
    const GradientArguments gradient{spans.gradient.data(), spans.gradient16.values};
    if (gradient.narrow != nullptr && spans.gradient16.dtype != spans.weight16_dtype)
      throw UsageError(
          "16-bit gradients must have the dtype of the weights; gradients in {}, weights in {}",
          name_of(spans.gradient16.dtype), name_of(spans.weight16_dtype));
    const unsigned blocks = spans.far ? kFarBlocks : std::numeric_limits<unsigned>::max();
    const UpdateArguments constants{kernels::UpdateConstants(scalars),
                                    spans.follows_weight16 ? 1 : 0, scalars.late_scale};
    const UpdateFunctions& functions = scalars.formula == kernels::Formula::kLion ? lion_ : adam_;
    const std::int64_t threads = count / kPack + kPack;
    float* const exp_avg = spans.exp_avg.data();
    float* const exp_avg_sq = spans.exp_avg_sq.data();
    std::byte* const copy = spans.weight16;
    const DType dtype = copy == nullptr ? DType::kFloat32 : spans.weight16_dtype;
    if (spans.has_states8()) {
      CUfunction function = functions.over_masters8[kernel_place_of(dtype)];
      if (spans.has_remainder()) function = functions.remainder8;
      if (spans.rounds_weight16) function = functions.rounded8;
      MapArguments maps;
      maps.keeps_positive = scalars.keeps_positive ? 1 : 0;
      const auto warps = static_cast<std::int64_t>(kernels::blocks8(spans.numel()));
      // No more than run at once, for each of them begins by filling its tables.
      const unsigned resident = kBlocks8 * module_.blocks_max() / kBlocksPerProcessor;
      module_.launch_at_most(std::min(blocks, resident), function, warps * kWarp, stream,
                             spans.weight.data(), copy, spans.remainder, spans.states8, gradient,
                             count, constants, maps);
    } else if (spans.has_remainder()) {
      module_.launch_at_most(blocks, functions.remainder, count / kByte + 1, stream, copy,
                             spans.remainder, exp_avg, exp_avg_sq, gradient, count, constants);
    } else if (spans.has_moments16()) {
      module_.launch_at_most(blocks, functions.rounded16, threads, stream, copy,
                             spans.moments16.exp_avg, spans.moments16.exp_avg_sq, gradient, count,
                             constants);
    } else if (spans.rounds_weight16) {
      module_.launch_at_most(blocks, functions.rounded, threads, stream, copy, exp_avg, exp_avg_sq,
                             gradient, count, constants);
    } else {
      module_.launch_at_most(blocks, functions.over_masters[kernel_place_of(dtype)], threads,
                             stream, spans.weight.data(), exp_avg, exp_avg_sq, gradient, copy,
                             count, constants);
    }
  }
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, Stream& stream) override {
    require_kernel_types("A remainder", 0, DType::kBFloat16, source_dtype);
    if (numel.value == 0) return;
    module_.launch(remainder_[kernel_place_of(source_dtype)], numel.value / kByte + 2,
                   CudaStream::handle_of(stream), target, first.value, source, numel.value);
  }
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first,
                    Stream& stream) override {
    if (masters.empty()) return;
    const std::int64_t count = std::ssize(masters);
    module_.launch(join_masters_, count, CudaStream::handle_of(stream), masters.data(), weights,
                   remainder, first.value, count);
  }
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     Stream& stream) override {
    require_kernel_types("A cast", 0, DType::kFloat32, dtype);
    if (masters.empty()) return;
    const std::int64_t count = std::ssize(masters);
    module_.launch(adopt_[kernel_place_of(dtype)], count / kPack + kPack,
                   CudaStream::handle_of(stream), masters.data(), weights, count);
  }

 protected:
  // sums[i] = sum of squares of arrays[i]; `chunks` has room for chunks_of(arrays) doubles. Device
  // memory all.
  // All arrays in one kernel: one of a few megabytes would not fill the device.
  void queue_squares(double* sums, double* chunks, std::span<const std::span<const float>> arrays,
                     CUstream stream) const {
    while (!arrays.empty()) {
      const auto here = arrays.first(std::min<std::size_t>(arrays.size(), SquareArguments::kMost));
      SquareArguments taken{};
      for (const auto values : here) {
        taken.at[taken.count++] = {values.data(), static_cast<std::int64_t>(values.size()),
                                   taken.chunks};
        taken.chunks += chunks_of({&values, 1});
      }
      if (taken.chunks > 0)
        module_.launch(chunk_sums_, taken.chunks * kWarp, stream, chunks, taken);
      module_.launch_grid(totals_, {static_cast<unsigned>(taken.count), 1, kWarp}, stream, sums,
                          chunks, taken);
      sums += taken.count;
      chunks += taken.chunks;
      arrays = arrays.subspan(here.size());
    }
  }
  static std::int64_t chunks_of(std::span<const std::span<const float>> arrays) {
    std::int64_t chunks = 0;
    for (const auto values : arrays)
      chunks += (static_cast<std::int64_t>(values.size()) + kChunk - 1) / kChunk;
    return chunks;
  }
  // Adds each piece's fingerprint to `sums`, which holds zeroes.
  void add_fingerprints(std::byte* sums, std::span<const std::byte> bytes, Bytes piece,
                        CUstream stream) const {
    if (bytes.empty()) return;
    // Many, since blocks of a piece add to one place; of a small run fewer, so that the device has
    // enough to do at once.
    constexpr std::int64_t kWordsPerThread = 64;
    constexpr std::int64_t kWordsLeast = 4;
    const std::int64_t size = std::ssize(bytes);
    const std::int64_t share =
        size / 8 / (std::int64_t{CudaModule::kThreads} * module_.blocks_max());
    const std::int64_t words_per_thread = std::clamp(share, kWordsLeast, kWordsPerThread);
    const std::int64_t pieces = (size + piece.value - 1) / piece.value;
    const std::int64_t words = std::min(size, piece.value) / 8 + 1;
    const auto blocks = static_cast<unsigned>(
        std::max<std::int64_t>(1, words / (std::int64_t{CudaModule::kThreads} * words_per_thread)));
    // Pieces lie along x, which holds any number of them.
    module_.launch_grid(fingerprints_,
                        {static_cast<unsigned>(pieces), blocks, CudaModule::kThreads}, stream, sums,
                        bytes.data(), size, piece.value);
  }

 private:
  using ByType = std::array<CUfunction, kKernelTypes>;
  using ByTypes = std::array<ByType, kKernelTypes>;
  // The kernels of a formula, by the form of the masters.
  struct UpdateFunctions {
    ByType over_masters;  // in fp32, by the dtype of their copy
    CUfunction remainder;
    CUfunction rounded;
    CUfunction rounded16;  // with states in bf16
    ByType over_masters8;  // with states in 8 bits, and so the next two
    CUfunction remainder8;
    CUfunction rounded8;
  };
  UpdateFunctions update_functions(const std::string& formula) const {
    const auto find = [&](const char* form) {
      return module_.find(fmt::format("strata_{}{}", formula, form));
    };
    return {by_type(formula, 1),   find("_remainder"),        find("_rounded_f32"),
            find("_rounded_bf16"), by_type(formula + "8", 1), find("8_remainder"),
            find("8_rounded")};
  }

  // `first`: the place of the first type that the kernel has; null where it has none.
  ByType by_type(const std::string& kernel, std::size_t first) const {
    ByType found{};
    for (std::size_t place = first; place < kKernelTypes; ++place)
      found[place] = module_.find(fmt::format("strata_{}_{}", kernel, kKernelSuffixes[place]));
    return found;
  }
  // By target and source.
  ByTypes by_types(std::string_view kernel, std::size_t first) const {
    ByTypes found{};
    for (std::size_t to = first; to < kKernelTypes; ++to)
      found[to] = by_type(fmt::format("{}_{}", kernel, kKernelSuffixes[to]), first);
    return found;
  }

  // By processors: copy engines have links to serve, and copies of the model. False: not aligned to
  // 16 bytes, nothing was done.
  bool copy_by_kernel(std::span<std::byte> target, std::span<const std::byte> source,
                      CUstream stream) const {
    constexpr std::size_t kBytes = 16;
    const auto aligned = [](const void* at) {
      return reinterpret_cast<std::uintptr_t>(at) % kBytes == 0;
    };
    if (!aligned(target.data()) || !aligned(source.data()) || target.size() % kBytes != 0)
      return false;
    const auto packs = static_cast<std::int64_t>(target.size() / kBytes);
    if (packs > 0)
      module_.launch_at_most(kCopyBlocks, copy_, packs, stream, target.data(), source.data(),
                             packs);
    return true;
  }

  const CudaModule module_;
  const ByTypes cast_ = by_types("cast", 0);
  const ByTypes accumulate_ = by_types("accumulate", 1);
  const ByType sum_in_order_ = by_type("sum", 1);
  const UpdateFunctions adam_ = update_functions("adam");
  const UpdateFunctions lion_ = update_functions("lion");
  const ByType remainder_ = by_type("remainder", 0);
  const ByType adopt_ = by_type("adopt", 0);
  const ByType losses_ = by_type("losses", 1);
  const CUfunction copy_ = module_.find("strata_copy");
  const CUfunction chunk_sums_ = module_.find("strata_chunk_sums");
  const CUfunction totals_ = module_.find("strata_totals");
  const CUfunction gradient_factor_ = module_.find("strata_gradient_factor");
  const CUfunction fingerprints_ = module_.find("strata_fingerprints");
  const CUfunction join_masters_ = module_.find("strata_join_masters");
};

}  // namespace strata::device
