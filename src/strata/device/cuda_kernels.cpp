#include "strata/device/cuda_kernels.h"

#include <fmt/format.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/device/device.h"
#include "strata/kernels/adam_constants.h"

// The fat binary, placed into the library by cuda_fatbin.cpp.
extern "C" const unsigned char strata_cuda_fatbin[];

namespace strata::device {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerProcessor = 32;
constexpr unsigned kSumBlocks = 192;
constexpr unsigned kCopyBlocks = 264;
constexpr std::int64_t kPack = 4;       // elements that a thread takes at once
constexpr std::int64_t kByte = 8;       // the same, where a byte holds a bit of each
constexpr std::int64_t kChunk = 65536;  // of a sum: strata/kernels/grad_stats.cpp
constexpr unsigned kWarp = 32;

constexpr std::array<const char*, 4> kSuffixes = {"f64", "f32", "f16", "bf16"};

// Its place in the tables; their size when there is none.
std::size_t place_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0;
    case DType::kFloat32:
      return 1;
    case DType::kFloat16:
      return 2;
    case DType::kBFloat16:
      return 3;
    default:
      return kSuffixes.size();
  }
}

void require_types(const char* operation, std::size_t first, DType target, DType source) {
  for (const DType dtype : {target, source}) {
    const std::size_t place = place_of(dtype);
    if (place >= first && place < kSuffixes.size()) continue;
    throw UsageError(
        fmt::format("{} is defined for {}float32, float16 and bfloat16; cast other "
                    "tensors before; found: {}",
                    operation, first == 0 ? "float64, " : "", name_of(dtype)));
  }
}

// As the kernels declare it.
struct AdamArguments {
  float gradient_scale, decay, l2, lerp_weight, beta2, square_weight, correction2_root, eps,
      negative_step_size;
  int lerp_from_gradient;
  const float* late_scale;
};

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

AdamArguments arguments_from(const kernels::AdamScalars& scalars) {
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
          scalars.late_scale};
}

}  // namespace

CudaKernels::CudaKernels(std::shared_ptr<const CudaContext> context)
    : context_(std::move(context)) {
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  const CUresult loaded = cuda.ModuleLoadData(&module_, strata_cuda_fatbin);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
    throw DeviceError(fmt::format(
        "cuda:{} cannot run Strata's kernels, which need compute capability 8.0 or later; it has "
        "{}.{}",
        context_->index(), context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)));
  }
  cuda.check(loaded, "cuModuleLoadData");
  const int processors = context_->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  blocks_max_ = static_cast<unsigned>(processors) * kBlocksPerProcessor;
  for (std::size_t to = 0; to < kTypes; ++to) {
    for (std::size_t from = 0; from < kTypes; ++from) {
      const auto pair = fmt::format("{}_{}", kSuffixes[to], kSuffixes[from]);
      cast_[to][from] = find("strata_cast_" + pair);
      if (to > 0 && from > 0) accumulate_[to][from] = find("strata_accumulate_" + pair);
    }
    if (to > 0) sum_in_order_[to] = find(fmt::format("strata_sum_{}", kSuffixes[to]));
    if (to > 0) adam_[to] = find(fmt::format("strata_adam_{}", kSuffixes[to]));
    remainder_[to] = find(fmt::format("strata_remainder_{}", kSuffixes[to]));
  }
  adam_remainder_ = find("strata_adam_remainder");
  join_masters_ = find("strata_join_masters");
  scale_ = find("strata_scale");
  copy_ = find("strata_copy");
  chunk_sums_ = find("strata_chunk_sums");
  totals_ = find("strata_totals");
  gradient_factor_ = find("strata_gradient_factor");
  fingerprints_ = find("strata_fingerprints");
}

CudaKernels::~CudaKernels() {
  const CudaContext::Scope scope(*context_, std::nothrow);
  context_->driver().ModuleUnload(module_);
}

CUfunction CudaKernels::find(const std::string& name) const {
  CUfunction function = nullptr;
  context_->driver().check(context_->driver().ModuleGetFunction(&function, module_, name.c_str()),
                           name);
  return function;
}

void CudaKernels::launch(CUfunction function, std::int64_t threads, void** arguments,
                         CUstream stream, unsigned blocks_most) const {
  const auto wanted = static_cast<std::uint64_t>((threads + kThreads - 1) / kThreads);
  const auto blocks =
      static_cast<unsigned>(std::min<std::uint64_t>(wanted, std::min(blocks_max_, blocks_most)));
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(
      cuda.LaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

void CudaKernels::cast(std::byte* target, DType target_dtype, const std::byte* source,
                       DType source_dtype, Numel numel, CUstream stream) const {
  require_types("A cast", 0, target_dtype, source_dtype);
  if (numel.value == 0) return;
  std::int64_t count = numel.value;
  void* arguments[] = {&target, &source, &count};
  launch(cast_[place_of(target_dtype)][place_of(source_dtype)], count / kPack + kPack, arguments,
         stream);
}

void CudaKernels::accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                             DType source_dtype, Numel numel, CUstream stream) const {
  require_types("Accumulation", 1, target_dtype, source_dtype);
  if (numel.value == 0) return;
  std::int64_t count = numel.value;
  void* arguments[] = {&target, &source, &count};
  launch(accumulate_[place_of(target_dtype)][place_of(source_dtype)], count / kPack + kPack,
         arguments, stream);
}

void CudaKernels::scale(std::span<float> target, std::span<const float> source, float factor,
                        CUstream stream) const {
  STRATA_ASSERT(target.size() == source.size());
  if (target.empty()) return;
  float* to = target.data();
  const float* from = source.data();
  auto count = static_cast<std::int64_t>(target.size());
  void* arguments[] = {&to, &from, &factor, &count};
  launch(scale_, count / kPack + kPack, arguments, stream);
}

bool CudaKernels::copy(std::span<std::byte> target, std::span<const std::byte> source,
                       CUstream stream) const {
  constexpr std::size_t kBytes = 16;
  const auto aligned = [](const void* at) {
    return reinterpret_cast<std::uintptr_t>(at) % kBytes == 0;
  };
  if (!aligned(target.data()) || !aligned(source.data()) || target.size() % kBytes != 0)
    return false;
  auto packs = static_cast<std::int64_t>(target.size() / kBytes);
  if (packs == 0) return true;
  std::byte* to = target.data();
  const std::byte* from = source.data();
  void* arguments[] = {&to, &from, &packs};
  launch(copy_, packs, arguments, stream, kCopyBlocks);
  return true;
}

void CudaKernels::sum_in_order(std::span<float> target, std::span<const std::byte* const> sources,
                               DType dtype, float scale, bool accumulate, CUstream stream) const {
  require_types("A sum", 1, dtype, dtype);
  STRATA_ASSERT(!sources.empty() && sources.size() <= Device::kSourcesMax);
  if (target.empty()) return;
  SumArguments arguments_of_sum{};
  std::copy(sources.begin(), sources.end(), arguments_of_sum.sources);
  arguments_of_sum.count = static_cast<int>(sources.size());
  arguments_of_sum.scale = scale;
  arguments_of_sum.accumulate = accumulate ? 1 : 0;
  float* to = target.data();
  auto count = static_cast<std::int64_t>(target.size());
  void* arguments[] = {&to, &count, &arguments_of_sum};
  // Sums come from a link at a tenth of the device's own speed: few blocks keep up with it, and
  // leave room on the processors for the model.
  launch(sum_in_order_[place_of(dtype)], count / kPack + kPack, arguments, stream, kSumBlocks);
}

void CudaKernels::adam(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
                       CUstream stream) const {
  kernels::check_adam(spans, scalars);
  auto count = static_cast<std::int64_t>(spans.gradient.size());
  if (count == 0) return;
  AdamArguments constants = arguments_from(scalars);
  float* weight = spans.weight.data();
  float* exp_avg = spans.exp_avg.data();
  float* exp_avg_sq = spans.exp_avg_sq.data();
  const float* gradient = spans.gradient.data();
  std::byte* copy = spans.weight16;
  if (spans.has_remainder()) {
    kernels::MasterRemainder remainder = spans.remainder;
    void* arguments[] = {&copy, &remainder, &exp_avg, &exp_avg_sq, &gradient, &count, &constants};
    launch(adam_remainder_, count / kByte + 1, arguments, stream);
    return;
  }
  void* arguments[] = {&weight, &exp_avg, &exp_avg_sq, &gradient, &copy, &count, &constants};
  const DType dtype = copy == nullptr ? DType::kFloat32 : spans.weight16_dtype;
  launch(adam_[place_of(dtype)], count / kPack + kPack, arguments, stream);
}

void CudaKernels::store_remainder(const kernels::MasterRemainder& target, Numel first,
                                  const std::byte* source, DType source_dtype, Numel numel,
                                  CUstream stream) const {
  require_types("A remainder", 0, DType::kBFloat16, source_dtype);
  if (numel.value == 0) return;
  kernels::MasterRemainder to = target;
  std::int64_t begin = first.value;
  std::int64_t count = numel.value;
  void* arguments[] = {&to, &begin, &source, &count};
  launch(remainder_[place_of(source_dtype)], count / kByte + 2, arguments, stream);
}

void CudaKernels::join_masters(std::span<float> masters, const std::byte* weights,
                               const kernels::MasterRemainder& remainder, Numel first,
                               CUstream stream) const {
  if (masters.empty()) return;
  float* to = masters.data();
  kernels::MasterRemainder from = remainder;
  std::int64_t begin = first.value;
  std::int64_t count = std::ssize(masters);
  void* arguments[] = {&to, &weights, &from, &begin, &count};
  launch(join_masters_, count, arguments, stream);
}

void CudaKernels::fingerprints(std::byte* sums, std::span<const std::byte> bytes, Bytes piece,
                               CUstream stream) const {
  if (bytes.empty()) return;
  // Many, since blocks of a piece meet in one place; of a small run fewer, so that the device has
  // enough to do at once.
  constexpr std::int64_t kWordsPerThread = 64;
  constexpr std::int64_t kWordsLeast = 4;
  const std::byte* from = bytes.data();
  auto size = static_cast<std::int64_t>(bytes.size());
  const std::int64_t share = size / 8 / (std::int64_t{kThreads} * blocks_max_);
  const std::int64_t words_per_thread = std::clamp(share, kWordsLeast, kWordsPerThread);
  std::int64_t piece_size = piece.value;
  const std::int64_t pieces = (size + piece_size - 1) / piece_size;
  const std::int64_t words = std::min(size, piece_size) / 8 + 1;
  const auto blocks = static_cast<unsigned>(
      std::max<std::int64_t>(1, words / (std::int64_t{kThreads} * words_per_thread)));
  void* arguments[] = {&sums, &from, &size, &piece_size};
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  // Pieces lie along x, which holds any number of them.
  cuda.check(cuda.LaunchKernel(fingerprints_, static_cast<unsigned>(pieces), blocks, 1, kThreads, 1,
                               1, 0, stream, arguments, nullptr),
             "cuLaunchKernel");
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
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  while (!arrays.empty()) {
    const auto here = arrays.first(std::min<std::size_t>(arrays.size(), SquareArguments::kMost));
    SquareArguments taken{};
    for (const auto values : here) {
      taken.at[taken.count++] = {values.data(), static_cast<std::int64_t>(values.size()),
                                 taken.chunks};
      taken.chunks += chunks_of({&values, 1});
    }
    void* arguments[] = {&chunks, &taken};
    if (taken.chunks > 0) launch(chunk_sums_, taken.chunks * kWarp, arguments, stream);
    void* total_arguments[] = {&sums, &chunks, &taken};
    cuda.check(cuda.LaunchKernel(totals_, static_cast<unsigned>(taken.count), 1, 1, kWarp, 1, 1, 0,
                                 stream, total_arguments, nullptr),
               "cuLaunchKernel");
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
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(
      cuda.LaunchKernel(gradient_factor_, 1, 1, 1, kWarp, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

}  // namespace strata::device
