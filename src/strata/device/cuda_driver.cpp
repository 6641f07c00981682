#include "strata/device/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "strata/base/error.h"

// The fat binary, placed into the library by cuda_fatbin.cpp.
extern "C" const unsigned char strata_cuda_fatbin[];

namespace strata::device {
namespace {

// The version of the driver's interface that the table is written for.
constexpr int kInterface = 12000;

std::unique_ptr<const CudaDriver> load() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  auto* const symbol = ::dlsym(library, "cuGetProcAddress_v2");
  if (symbol == nullptr) return nullptr;
  const auto find = reinterpret_cast<decltype(&::cuGetProcAddress)>(symbol);
  auto driver = std::make_unique<CudaDriver>();
  bool complete = true;
  const auto resolve = [&](auto& function, const char* name) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult status{};
    const CUresult result = find(name, &address, kInterface, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    complete = complete && result == CUDA_SUCCESS && address != nullptr;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
#define STRATA_CUDA_RESOLVE(name) resolve(driver->name, "cu" #name);
  STRATA_CUDA_CALLS(STRATA_CUDA_RESOLVE)
#undef STRATA_CUDA_RESOLVE
  if (!complete || driver->Init(0) != CUDA_SUCCESS) return nullptr;
  return driver;
}

}  // namespace

const CudaDriver* CudaDriver::find() {
  static const std::unique_ptr<const CudaDriver> driver = load();
  return driver.get();
}

void CudaDriver::fail(CUresult result, std::string_view call) const {
  const char* name = nullptr;
  const char* words = nullptr;
  GetErrorName(result, &name);
  GetErrorString(result, &words);
  throw DeviceError(fmt::format(
      "the CUDA driver refused {}: {} ({}). An error of an earlier kernel may show here: run with "
      "CUDA_LAUNCH_BLOCKING=1 to find it",
      call, words != nullptr ? words : "unknown error",
      name != nullptr ? name : std::to_string(static_cast<int>(result)).c_str()));
}

CudaContext::CudaContext(const CudaDriver& driver, int index, std::shared_ptr<HostWaits> waits)
    : driver_(driver), index_(index), waits_(std::move(waits)) {
  driver_.check(driver_.DeviceGet(&device_, index), "cuDeviceGet");
  driver_.check(driver_.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() {
  driver_.DevicePrimaryCtxRelease(device_);
}

int CudaContext::attribute(CUdevice_attribute attribute) const {
  int value = 0;
  driver_.check(driver_.DeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute");
  return value;
}

CudaContext::Scope::Scope(const CudaContext& context) : driver_(context.driver_) {
  driver_.check(driver_.CtxPushCurrent(context.context_), "cuCtxPushCurrent");
}

CudaContext::Scope::Scope(const CudaContext& context, std::nothrow_t) noexcept
    : driver_(context.driver_), pushed_(driver_.CtxPushCurrent(context.context_) == CUDA_SUCCESS) {}

CudaContext::Scope::~Scope() {
  if (!pushed_) return;
  CUcontext mine = nullptr;
  driver_.CtxPopCurrent(&mine);
}

namespace {

constexpr unsigned kBlocksPerProcessor = 32;

}  // namespace

std::size_t kernel_place_of(DType dtype) {
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
      return kKernelSuffixes.size();
  }
}

void require_kernel_types(const char* operation, std::size_t first, DType target, DType source) {
  for (const DType dtype : {target, source}) {
    const std::size_t place = kernel_place_of(dtype);
    if (place >= first && place < kKernelSuffixes.size()) continue;
    throw UsageError(
        fmt::format("{} is defined for {}float32, float16 and bfloat16; cast other "
                    "tensors before; found: {}",
                    operation, first == 0 ? "float64, " : "", name_of(dtype)));
  }
}

CudaModule::CudaModule(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
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
}

CudaModule::~CudaModule() {
  const CudaContext::Scope scope(*context_, std::nothrow);
  context_->driver().ModuleUnload(module_);
}

CUfunction CudaModule::find(const std::string& name) const {
  CUfunction function = nullptr;
  context_->driver().check(context_->driver().ModuleGetFunction(&function, module_, name.c_str()),
                           name);
  return function;
}

void CudaModule::launch_grid(CUfunction function, const Grid& grid, CUstream stream,
                             void** arguments) const {
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(cuda.LaunchKernel(function, grid.x, grid.y, 1, grid.threads, 1, 1, 0, stream,
                               arguments, nullptr),
             "cuLaunchKernel");
}

namespace {

class CudaEvent final : public TimedEvent {
 public:
  CudaEvent(std::shared_ptr<const CudaContext> context, unsigned int flags)
      : context_(std::move(context)) {
    const CudaContext::Scope scope(*context_);
    const CudaDriver& cuda = context_->driver();
    cuda.check(cuda.EventCreate(&event_, flags), "cuEventCreate");
  }
  ~CudaEvent() override {
    const CudaContext::Scope scope(*context_, std::nothrow);
    context_->driver().EventDestroy(event_);
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  CUevent handle() const { return event_; }

  bool done() override {
    const CudaDriver& cuda = context_->driver();
    const CUresult result = cuda.EventQuery(event_);
    if (result == CUDA_ERROR_NOT_READY) return false;
    cuda.check(result, "cuEventQuery");
    return true;
  }

  void wait() override {
    const CudaContext::Scope scope(*context_);
    const CudaDriver& cuda = context_->driver();
    context_->waits()->note();
    cuda.check(cuda.EventSynchronize(event_), "cuEventSynchronize");
  }

  // Both events must have been made with times.
  double seconds_since(TimedEvent& earlier) override {
    const auto* ours = dynamic_cast<const CudaEvent*>(&earlier);
    STRATA_ASSERT(ours != nullptr);
    const CudaContext::Scope scope(*context_);
    const CudaDriver& cuda = context_->driver();
    float milliseconds = 0.0F;
    cuda.check(cuda.EventElapsedTime(&milliseconds, ours->event_, event_), "cuEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  CUevent event_ = nullptr;
};

class OwnStream final : public CudaStream {
 public:
  explicit OwnStream(std::shared_ptr<const CudaContext> shared) : CudaStream(std::move(shared)) {
    const CudaContext::Scope scope(context());
    const CudaDriver& cuda = context().driver();
    cuda.check(cuda.StreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~OwnStream() override {
    const CudaContext::Scope scope(context(), std::nothrow);
    context().driver().StreamDestroy(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  CUstream handle() const override { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

class ComputeStream final : public CudaStream {
 public:
  ComputeStream(std::shared_ptr<const CudaContext> context, std::function<void*()> find)
      : CudaStream(std::move(context)), find_(std::move(find)) {}
  CUstream handle() const override {
    return find_ ? static_cast<CUstream>(find_()) : CU_STREAM_LEGACY;
  }

 private:
  std::function<void*()> find_;
};

}  // namespace

std::unique_ptr<Event> CudaStream::record() {
  auto event = std::make_unique<CudaEvent>(context_, CU_EVENT_DISABLE_TIMING);
  mark(event->handle());
  return event;
}

std::unique_ptr<TimedEvent> CudaStream::record_timed() {
  auto event = std::make_unique<CudaEvent>(context_, CU_EVENT_DEFAULT);
  mark(event->handle());
  return event;
}

void CudaStream::mark(CUevent event) {
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(cuda.EventRecord(event, handle()), "cuEventRecord");
}

void CudaStream::wait_for(Event& event) {
  const auto* ours = dynamic_cast<const CudaEvent*>(&event);
  STRATA_ASSERT(ours != nullptr);
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(cuda.StreamWaitEvent(handle(), ours->handle(), CU_EVENT_WAIT_DEFAULT),
             "cuStreamWaitEvent");
}

void CudaStream::synchronize() {
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  context_->waits()->note();
  cuda.check(cuda.StreamSynchronize(handle()), "cuStreamSynchronize");
}

std::unique_ptr<CudaStream> make_cuda_stream(std::shared_ptr<const CudaContext> context) {
  return std::make_unique<OwnStream>(std::move(context));
}

std::unique_ptr<CudaStream> make_compute_stream(std::shared_ptr<const CudaContext> context,
                                                std::function<void*()> find) {
  return std::make_unique<ComputeStream>(std::move(context), std::move(find));
}

}  // namespace strata::device
