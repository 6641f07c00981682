#include "strata/torch/base/placement.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Registry.h>
#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/device/cpu_device.h"
#include "strata/device/cuda_device.h"

namespace c10 {

// As c10/cuda/CUDACachingAllocator.h declares it, which needs headers of CUDA.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

}  // namespace c10

namespace strata::torch {
namespace {

using GrowthCalls = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

// Those of torch's allocator; null: it has none.
GrowthCalls* growth_calls() {
  for (const char* const variable : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const char* const text = std::getenv(variable);
    if (text != nullptr && std::strstr(text, "cudaMallocAsync") != nullptr) return nullptr;
  }
  void* const library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  const auto get = reinterpret_cast<GrowthCalls* (*)()>(
      dlsym(library, "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev"));
  return get != nullptr ? get() : nullptr;
}

void call_growth() {
  GrowthCalls* const calls = growth_calls();
  if (calls == nullptr) return;
  for (const std::string& name : calls->Keys()) calls->Create(name)->Execute();
}

class GrowthCall final : public c10::FreeMemoryCallback {
 public:
  explicit GrowthCall(const std::weak_ptr<GiveBack>& call) : call_(call.lock()) {}
  bool Execute() override {
    try {
      return call_ != nullptr && (*call_)();
    } catch (const std::exception&) {  // of a lost device, which torch's allocation finds, too
      return false;
    }
  }

 private:
  const std::shared_ptr<GiveBack> call_;
};

constexpr int kThreadsOfALink = 8;  // copy as fast as a PCIe 5 link of 16 lanes drains

int cores_of_quota(double quota, double period) {
  if (!(quota > 0.0) || !(period > 0.0)) return std::numeric_limits<int>::max();
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

// A container may have all cores but only a share of their time; it sees its own group as the root.
int cores_of_group() {
  double quota = 0.0;
  double period = 0.0;
  if (std::ifstream both("/sys/fs/cgroup/cpu.max"); both >> quota >> period)
    return cores_of_quota(quota, period);  // "max", no limit, is no number
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period) return cores_of_quota(quota, period);
  return std::numeric_limits<int>::max();
}

std::optional<int> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? std::nullopt : whole_number(text);
}

int gpus_of_torch() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

std::string describe_gpus() {
  return fmt::format("torch sees {} GPUs, {}", gpus_of_torch(),
                     device::cuda_is_built()
                         ? fmt::format("Strata {}", device::cuda_device_count())
                         : std::string("this build of Strata has no CUDA device"));
}

c10::Device gpu_of_rank(int local_rank) {
  const int count = usable_gpus();
  if (count == 1) return {c10::DeviceType::CUDA, 0};  // launchers may show each rank its own alone
  if (local_rank >= 0 && local_rank < count)
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank)};
  throw ConfigError(
      "strata.device: every rank of a host needs a GPU of its own; start fewer ranks a host, or "
      "write \"cpu\"; found LOCAL_RANK {} and {} GPUs",
      local_rank, count);
}

constexpr std::int64_t kTokens = 32;
constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kHeadWidth = kWidth / kHeads;

// Normalizes by the root mean square, computed in fp32 as in transformers.
at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + 1e-6)).to(x.scalar_type());
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const at::Tensor low = x.narrow(-1, 0, kHeadWidth / 2);
  const at::Tensor high = x.narrow(-1, kHeadWidth / 2, kHeadWidth / 2);
  return x * cosine + at::cat({-high, low}, -1) * sine;
}

}  // namespace

std::optional<c10::Device> device_of(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  std::optional<c10::Device> found;
  std::string first;
  for (const auto& [name, tensor] : parameters) {
    const c10::Device device = tensor.device();
    if (device.is_meta())
      throw ConfigError(
          "a model that was built without values (on the meta device) cannot be initialized; use "
          "strata.load_pretrained, or give its parameters values first; found '{}'",
          name);
    if (!device.is_cpu() && !device.is_cuda())
      throw ConfigError("parameters must be on the CPU or on a CUDA device; found '{}' on {}", name,
                        device.str());
    if (found && *found != device)
      throw ConfigError(
          "all parameters of a model must be on one device; move it there with model.to(device); "
          "found '{}' on {} and '{}' on {}",
          first, found->str(), name, device.str());
    if (!found) first = name;
    found = device;
  }
  return found;
}

int usable_gpus() {
  if (!device::cuda_is_built()) return 0;
  const int torch = gpus_of_torch();
  return torch == 0 ? 0 : std::min(torch, device::cuda_device_count());
}

c10::Device choose_device(engine::DeviceKind wanted, std::optional<c10::Device> present,
                          int local_rank) {
  const c10::Device host(c10::DeviceType::CPU);
  const bool on_gpu = present && present->is_cuda();
  if (wanted == engine::DeviceKind::kCpu) return host;
  if (wanted == engine::DeviceKind::kAuto && !on_gpu && usable_gpus() == 0) return host;
  if (usable_gpus() == 0)
    throw ConfigError(
        "strata.device: no GPU can be used here; write \"cpu\", or make the GPU visible to a build "
        "with CUDA; {}, and {}",
        on_gpu ? fmt::format("the model is on {}", present->str()) : "\"cuda\" is asked for",
        describe_gpus());
  return on_gpu ? *present : gpu_of_rank(local_rank);
}

std::shared_ptr<device::Device> make_device(c10::Device place, int threads,
                                            std::shared_ptr<device::HostWaits> waits) {
  if (!place.is_cuda()) {
    device::CpuDeviceOptions options;
    options.threads = threads;
    options.cores = host_cores(threads);
    options.waits = std::move(waits);
    return std::make_shared<device::CpuDevice>(options);
  }
  device::CudaDeviceOptions options;
  options.index = place.index();
  options.waits = std::move(waits);
  options.compute_stream = [place] { return current_stream(place).native_handle(); };
  options.release_unused = [place] {
    call_growth();
    release_cached_memory(place);
  };
  std::shared_ptr<device::Device> device = device::make_cuda_device(options);
  // torch's Python layer would do this later, with the interpreter's lock held.
  at::globalContext().lazyInitDevice(place.type());
  return device;
}

c10::Stream current_stream(c10::Device place) {
  return c10::impl::VirtualGuardImpl(place.type()).getStream(place);
}

at::Tensor tensor_over(const void* memory, std::int64_t numel, c10::ScalarType type,
                       c10::Device place) {
  // Many functions of torch take mutable tensors although they only read them.
  const std::int64_t sizes[] = {numel};
  return at::for_blob(const_cast<void*>(memory), sizes)
      .options(at::TensorOptions().dtype(type).device(place))
      .target_device(place)
      .make_tensor();
}

void release_cached_memory(c10::Device place) {
  if (!place.is_cpu()) c10::getDeviceAllocator(place.type())->emptyCache();
}

std::shared_ptr<void> on_growth(c10::Device place, GiveBack give_back) {
  GrowthCalls* const calls = place.is_cuda() ? growth_calls() : nullptr;
  if (calls == nullptr) return nullptr;
  auto call = std::make_shared<GiveBack>(std::move(give_back));
  const std::weak_ptr<GiveBack> weak = call;  // torch keeps what is registered for ever
  calls->Register(fmt::format("strata {}", calls->Keys().size()),
                  [weak] { return std::make_unique<GrowthCall>(weak); });
  GiveBack* const token = call.get();
  return {token, [weak, call = std::move(call)](void*) mutable {
            call.reset();
            while (!weak.expired()) std::this_thread::yield();  // it may be running
          }};
}

std::optional<int> whole_number(std::string_view text) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

int usable_cores() {
  const int allowed = std::max(1, static_cast<int>(allowed_cores().size()));
  return std::min(allowed, cores_of_group());
}

int ranks_of_host(int world_size) {
  const std::optional<int> ranks = number_in("LOCAL_WORLD_SIZE");
  return ranks && *ranks >= 1 ? std::min(*ranks, world_size) : world_size;
}

int host_threads(std::optional<int> wanted, int world_size) {
  if (wanted) return *wanted;
  return std::clamp(usable_cores() / ranks_of_host(world_size), 1, kMostHostThreads);
}

int reference_threads(std::optional<int> wanted, int world_size) {
  const int share = host_threads(wanted, world_size);
  if (wanted) return share;
  const int others = ranks_of_host(world_size) - 1;
  const int left = usable_cores() - others * std::min(share, kThreadsOfALink);
  return std::clamp(left, share, 2 * kMostHostThreads);
}

std::vector<int> host_cores(int threads) {
  const std::optional<int> rank = number_in("LOCAL_RANK");
  const std::optional<int> ranks = number_in("LOCAL_WORLD_SIZE");
  return rank && ranks ? cores_to_bind(*rank, *ranks, threads) : std::vector<int>();
}

io::EngineOptions reading_options(int threads) {
  return {.piece = 1_MiB, .threads = std::clamp(threads * 3 / 4, 4, 16)};
}

void warm_up(c10::Device place, c10::ScalarType dtype) {
  const c10::DeviceGuard on_place(place);
  const c10::AutoGradMode with_gradients(true);
  const at::TensorOptions there = at::TensorOptions().device(place);
  const auto weight = [&](at::IntArrayRef shape) {
    return at::ones(shape, there.dtype(dtype)).set_requires_grad(true);
  };
  const at::Tensor ids = at::arange(kTokens, there.dtype(at::kLong)).view({1, kTokens});
  const at::Tensor table = weight({kTokens, kWidth});
  const at::Tensor scale = weight({kWidth});
  const at::Tensor project = weight({kWidth, kWidth});

  const at::Tensor places = ids.to(at::kFloat).view({1, 1, kTokens});
  const at::Tensor rates = at::ones({1, kHeadWidth / 2, 1}, there.dtype(at::kFloat));
  const at::Tensor half = at::matmul(rates, places).transpose(1, 2);
  const at::Tensor angles = at::cat({half, half}, -1);
  const at::Tensor cosine = angles.cos().to(dtype).unsqueeze(1);
  const at::Tensor sine = angles.sin().to(dtype).unsqueeze(1);

  at::Tensor x = at::embedding(table, ids);
  const at::Tensor query =
      at::linear(normed(x, scale), project).view({1, kTokens, kHeads, kHeadWidth}).transpose(1, 2);
  const at::Tensor attended = at::scaled_dot_product_attention(
      rotated(query, cosine, sine), rotated(query, cosine, sine), query, {}, 0.0, true);
  x = x + at::linear(attended.transpose(1, 2).reshape({1, kTokens, kWidth}), project);
  const at::Tensor inner = at::linear(normed(x, scale), project);
  x = x + at::linear(at::silu(inner) * inner, project);
  const at::Tensor logits = at::linear(normed(x, scale), table).to(at::kFloat);
  at::cross_entropy_loss(logits.view({kTokens, kTokens}), ids.view({kTokens})).backward();
  current_stream(place).synchronize();
}

}  // namespace strata::torch
