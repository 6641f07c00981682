// The CUDA driver, loaded when it is first asked for, so that one build runs with and without it.
// A function of the driver is called through the table as cuda.MemAlloc(...), which checks its
// result with check().
// Threads: the table never changes; the driver's calls are safe from any thread whose current
// context is the right one (CudaContext::Scope). Ownership: the library stays loaded.
// Errors: DeviceError with the call's name and the driver's words.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/device/device.h"

// The fat binary, placed into the library by cuda_fatbin.cpp.
extern "C" const unsigned char strata_cuda_fatbin[];

namespace strata::device {

// The version of the driver's interface that the table is written for.
inline constexpr int kInterface = 12000;

struct CudaDriver {
// clang-format 14 indents these further each time.
// clang-format off
#define STRATA_CUDA_CALLS(X) \
  X(Init) X(DeviceGetCount) X(DeviceGet) X(DeviceGetAttribute) X(DevicePrimaryCtxRetain) \
  X(DevicePrimaryCtxRelease) X(CtxGetCurrent) X(CtxPushCurrent) X(CtxPopCurrent) X(MemGetInfo) \
  X(MemAlloc) X(MemFree) X(MemcpyAsync) X(MemsetD8Async) X(MemHostRegister) X(MemHostUnregister) \
  X(MemAddressReserve) X(MemAddressFree) X(MemCreate) X(MemRelease) X(MemMap) X(MemUnmap) \
  X(MemSetAccess) X(MemGetAllocationGranularity) X(PointerGetAttribute) X(StreamDestroy) \
  X(StreamSynchronize) X(StreamWaitEvent) X(EventCreate) X(EventDestroy) X(EventRecord) \
  X(EventQuery) X(EventElapsedTime) X(EventSynchronize) X(ModuleLoadData) X(ModuleUnload) \
  X(ModuleGetFunction) X(LaunchKernel) X(GetErrorName) X(GetErrorString) \
  X(MemExportToShareableHandle) X(MemImportFromShareableHandle) X(StreamWriteValue32) \
  X(StreamWaitValue32) X(MemHostGetDevicePointer) X(StreamCreate) X(DriverGetVersion) \
  X(DeviceGetName) X(DeviceTotalMem) X(DeviceCanAccessPeer)
// clang-format on
#define STRATA_CUDA_DECLARE(name) decltype(&::cu##name) name = nullptr;
  STRATA_CUDA_CALLS(STRATA_CUDA_DECLARE)
#undef STRATA_CUDA_DECLARE

  struct Loaded {
    std::unique_ptr<const CudaDriver> driver;
    std::string absence;  // why there is none
  };
  static const Loaded& loaded() {
    static const Loaded result = load();
    return result;
  }
  // Null where no driver is installed, one too old to have all of these, or one without a device.
  static const CudaDriver* find() {
    return loaded().driver.get();
  }

  static Loaded load() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      return {nullptr, "the CUDA driver (libcuda.so.1) is not installed, or cannot be loaded"};
    constexpr const char* kOld = "the CUDA driver is older than 12.0; update it";
    auto* const symbol = ::dlsym(library, "cuGetProcAddress_v2");
    if (symbol == nullptr) return {nullptr, kOld};
    const auto find = reinterpret_cast<decltype(&::cuGetProcAddress)>(symbol);
    auto driver = std::make_unique<CudaDriver>();
    bool complete = true;
    const auto resolve = [&](auto& function, const char* name) {
      void* address = nullptr;
      CUdriverProcAddressQueryResult status{};
      const CUresult result =
          find(name, &address, kInterface, CU_GET_PROC_ADDRESS_DEFAULT, &status);
      complete = complete && result == CUDA_SUCCESS && address != nullptr;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
#define STRATA_CUDA_RESOLVE(name) resolve(driver->name, "cu" #name);
    STRATA_CUDA_CALLS(STRATA_CUDA_RESOLVE)
#undef STRATA_CUDA_RESOLVE
    if (!complete) return {nullptr, kOld};
    const CUresult begun = driver->Init(0);
    if (begun != CUDA_SUCCESS) return {nullptr, "the CUDA driver says: " + driver->words(begun)};
    return {std::move(driver), ""};
  }

  std::string words(CUresult result) const {
    const char* name = nullptr;
    const char* words = nullptr;
    GetErrorName(result, &name);
    GetErrorString(result, &words);
    return std::string(words != nullptr ? words : "unknown error") + " (" +
           (name != nullptr ? std::string(name) : std::to_string(static_cast<int>(result))) + ")";
  }
  [[noreturn]] void fail(CUresult result, std::string_view call) const {
    throw DeviceError(
        "the CUDA driver refused {}: {}. An error of an earlier kernel may show here: run with "
        "CUDA_LAUNCH_BLOCKING=1 to find it",
        call, words(result));
  }
  void check(CUresult result, std::string_view call) const {
    if (result != CUDA_SUCCESS) fail(result, call);
  }
};

// A device's primary context, which every framework in the process shares.
class CudaContext : NonCopyable {
 public:
  CudaContext(const CudaDriver& driver, int index, std::shared_ptr<HostWaits> waits)
      : driver_(driver), index_(index), waits_(std::move(waits)) {
    driver_.check(driver_.DeviceGet(&device_, index), "cuDeviceGet");
    driver_.check(driver_.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  }
  ~CudaContext() {
    for (CUevent event : events_) end(&CudaDriver::EventDestroy, event);
    driver_.DevicePrimaryCtxRelease(device_);
  }

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  int index() const { return index_; }
  int attribute(CUdevice_attribute attribute) const {
    int value = 0;
    driver_.check(driver_.DeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute");
    return value;
  }
  const std::shared_ptr<HostWaits>& waits() const { return waits_; }

  // An event without times, and its return for another use: a step has hundreds.
  CUevent take_event() const {
    {
      const std::lock_guard lock(events_mutex_);
      if (!events_.empty()) {
        CUevent event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    CUevent event = nullptr;
    call("cuEventCreate", &CudaDriver::EventCreate, &event,
         static_cast<unsigned>(CU_EVENT_DISABLE_TIMING));
    return event;
  }
  void give_back(CUevent event) const {
    const std::lock_guard lock(events_mutex_);
    events_.push_back(event);
  }

  // Makes the context the calling thread's own for as long as it lives.
  class Scope : NonCopyable {
   public:
    explicit Scope(const CudaContext& context) : Scope(context, std::nothrow) {
      driver_.check(result_, "cuCtxPushCurrent");
    }
    // For destructors: a driver that is shutting down already is no error.
    Scope(const CudaContext& context, std::nothrow_t) noexcept : driver_(context.driver_) {
      CUcontext current = nullptr;
      if (driver_.CtxGetCurrent(&current) == CUDA_SUCCESS && current == context.context_) return;
      result_ = driver_.CtxPushCurrent(context.context_);
      pushed_ = result_ == CUDA_SUCCESS;
    }
    ~Scope() {
      if (!pushed_) return;
      CUcontext mine = nullptr;
      driver_.CtxPopCurrent(&mine);
    }

   private:
    const CudaDriver& driver_;
    CUresult result_ = CUDA_SUCCESS;
    bool pushed_ = false;
  };

  // Calls a function of the driver in this context, and checks its result.
  template <typename Function, typename... Arguments>
  void call(std::string_view name, Function CudaDriver::*function, Arguments... arguments) const {
    const Scope scope(*this);
    driver_.check((driver_.*function)(arguments...), name);
  }
  // The same for destructors: a driver that is shutting down already is no error.
  template <typename Function, typename... Arguments>
  void end(Function CudaDriver::*function, Arguments... arguments) const noexcept {
    const Scope scope(*this, std::nothrow);
    (driver_.*function)(arguments...);
  }

 private:
  const CudaDriver& driver_;
  int index_;
  std::shared_ptr<HostWaits> waits_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  mutable std::mutex events_mutex_;
  mutable std::vector<CUevent> events_;
};

// The compiled kernels, loaded into one device's context: finds them by name and launches them.
// Threads: calls from any thread; work goes to the stream that is given. Errors: UsageError for
// element types that a kernel does not have; DeviceError.

// Types of elements that kernels know, by their places in tables: fp64, fp32, fp16, bf16.
inline constexpr std::size_t kKernelTypes = 4;
inline constexpr std::array<const char*, kKernelTypes> kKernelSuffixes = {"f64", "f32", "f16",
                                                                          "bf16"};
inline constexpr std::array<DType, kKernelTypes> kKernelDTypes = {
    DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
// kKernelTypes where there is none.
inline std::size_t kernel_place_of(DType dtype) {
  const auto* const place = std::ranges::find(kKernelDTypes, dtype);
  return static_cast<std::size_t>(place - kKernelDTypes.begin());
}
// `first`: the place of the first type that the operation has.
inline void require_kernel_types(const char* operation, std::size_t first, DType target,
                                 DType source) {
  for (const DType dtype : {target, source}) {
    const std::size_t place = kernel_place_of(dtype);
    if (place >= first && place < kKernelSuffixes.size()) continue;
    throw UsageError(
        "{} is defined for {}float32, float16 and bfloat16; cast other tensors before; found: {}",
        operation, first == 0 ? "float64, " : "", name_of(dtype));
  }
}

inline constexpr unsigned kBlocksPerProcessor = 32;

class CudaModule : NonCopyable {
 public:
  static constexpr unsigned kThreads = 256;  // of a block

  explicit CudaModule(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
    const CudaContext::Scope scope(*context_);
    const CudaDriver& cuda = context_->driver();
    const CUresult loaded = cuda.ModuleLoadData(&module_, strata_cuda_fatbin);
    if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
      throw DeviceError(
          "cuda:{} cannot run Strata's kernels, which need compute capability 8.0 or later; it has "
          "{}.{}",
          context_->index(), context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
          context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    }
    cuda.check(loaded, "cuModuleLoadData");
    const int processors = context_->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    blocks_max_ = static_cast<unsigned>(processors) * kBlocksPerProcessor;
  }
  ~CudaModule() { context_->end(&CudaDriver::ModuleUnload, module_); }

  const CudaContext& context() const { return *context_; }
  // Enough to fill the device several times.
  unsigned blocks_max() const { return blocks_max_; }
  CUfunction find(const std::string& name) const {
    CUfunction function = nullptr;
    context_->driver().check(context_->driver().ModuleGetFunction(&function, module_, name.c_str()),
                             name);
    return function;
  }
  // `threads` of work; `arguments`: values of exactly the types of the kernel's parameters.
  template <typename... Arguments>
  void launch(CUfunction function, std::int64_t threads, CUstream stream,
              Arguments... arguments) const {
    launch_at_most(blocks_max_, function, threads, stream, arguments...);
  }
  // The same in at most `blocks_most` blocks.
  template <typename... Arguments>
  void launch_at_most(unsigned blocks_most, CUfunction function, std::int64_t threads,
                      CUstream stream, Arguments... arguments) const {
    const auto wanted = static_cast<std::uint64_t>((threads + kThreads - 1) / kThreads);
    const std::uint64_t blocks =
        std::min({wanted, std::uint64_t{blocks_max_}, std::uint64_t{blocks_most}});
    launch_grid(function, {static_cast<unsigned>(blocks), 1, kThreads}, stream, arguments...);
  }
  // A grid of its own.
  struct Grid {
    unsigned x = 1;
    unsigned y = 1;
    unsigned threads = 1;  // of a block
  };
  template <typename... Arguments>
  void launch_grid(CUfunction function, const Grid& grid, CUstream stream,
                   Arguments... arguments) const {
    void* pointers[] = {&arguments...};
    context_->call("cuLaunchKernel", &CudaDriver::LaunchKernel, function, grid.x, grid.y, 1U,
                   grid.threads, 1U, 1U, 0U, stream, pointers, nullptr);
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  CUmodule module_ = nullptr;
  unsigned blocks_max_ = 0;
};

// Threads: any. Ownership: keeps the context alive.
class CudaEvent final : public TimedEvent {
 public:
  CudaEvent(std::shared_ptr<const CudaContext> context, bool timed)
      : context_(std::move(context)), timed_(timed) {
    if (!timed)
      event_ = context_->take_event();
    else
      context_->call("cuEventCreate", &CudaDriver::EventCreate, &event_,
                     static_cast<unsigned>(CU_EVENT_DEFAULT));
  }
  ~CudaEvent() override {
    if (timed_)
      context_->end(&CudaDriver::EventDestroy, event_);
    else
      context_->give_back(event_);
  }

  CUevent handle() const { return event_; }

  bool done() override {
    const CudaDriver& cuda = context_->driver();
    const CUresult result = cuda.EventQuery(event_);
    if (result == CUDA_ERROR_NOT_READY) return false;
    cuda.check(result, "cuEventQuery");
    return true;
  }

  void wait() override {
    context_->waits()->note();
    context_->call("cuEventSynchronize", &CudaDriver::EventSynchronize, event_);
  }

  // Both events must have been made with times.
  double seconds_since(TimedEvent& earlier) override {
    const auto* ours = dynamic_cast<const CudaEvent*>(&earlier);
    STRATA_ASSERT(ours != nullptr);
    float milliseconds = 0.0F;
    context_->call("cuEventElapsedTime", &CudaDriver::EventElapsedTime, &milliseconds, ours->event_,
                   event_);
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  bool timed_;
  CUevent event_ = nullptr;
};

// Streams and events of a CUDA device.
// Threads: device.h. Ownership: each keeps the context alive; a stream may go while its work runs.
class CudaStream : public Stream {
 public:
  explicit CudaStream(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}

  static CUstream handle_of(const Stream& stream) {
    const auto* ours = dynamic_cast<const CudaStream*>(&stream);
    STRATA_ASSERT(ours != nullptr);
    return ours->handle();
  }
  virtual CUstream handle() const = 0;
  std::unique_ptr<Event> record() override {
    auto event = std::make_unique<CudaEvent>(context_, /*timed=*/false);
    mark(event->handle());
    return event;
  }
  std::unique_ptr<TimedEvent> record_timed() override {
    auto event = std::make_unique<CudaEvent>(context_, /*timed=*/true);
    mark(event->handle());
    return event;
  }
  void wait_for(Event& event) override {
    const auto* ours = dynamic_cast<const CudaEvent*>(&event);
    STRATA_ASSERT(ours != nullptr);
    context_->call("cuStreamWaitEvent", &CudaDriver::StreamWaitEvent, handle(), ours->handle(),
                   static_cast<unsigned>(CU_EVENT_WAIT_DEFAULT));
  }
  void synchronize() override {
    context_->waits()->note();
    context_->call("cuStreamSynchronize", &CudaDriver::StreamSynchronize, handle());
  }

 protected:
  const CudaContext& context() const { return *context_; }

 private:
  void mark(CUevent event) {
    context_->call("cuEventRecord", &CudaDriver::EventRecord, event, handle());
  }

  std::shared_ptr<const CudaContext> context_;
};

// A stream of the engine's own; no other stream waits for it unless wait_for() says so.
class OwnStream final : public CudaStream {
 public:
  explicit OwnStream(std::shared_ptr<const CudaContext> shared) : CudaStream(std::move(shared)) {
    context().call("cuStreamCreate", &CudaDriver::StreamCreate, &stream_,
                   static_cast<unsigned>(CU_STREAM_NON_BLOCKING));
  }
  ~OwnStream() override { context().end(&CudaDriver::StreamDestroy, stream_); }
  CUstream handle() const override { return stream_; }

 private:
  CUstream stream_ = nullptr;
};

// The stream that `find` names at each call; null: the default stream.
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

}  // namespace strata::device
