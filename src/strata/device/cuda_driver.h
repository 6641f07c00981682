// The CUDA driver, loaded when it is first asked for, so that one build runs with and without it.
// A function of the driver is called through the table as cuda.MemAlloc(...), which checks its
// result with check().
// Threads: the table never changes; the driver's calls are safe from any thread whose current
// context is the right one (CudaContext::Scope). Ownership: the library stays loaded.
// Errors: DeviceError with the call's name and the driver's words.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <string_view>

#include "strata/base/dtype.h"
#include "strata/device/device.h"

namespace strata::device {

struct CudaDriver {
// clang-format 14 indents these further each time.
// clang-format off
#define STRATA_CUDA_CALLS(X) \
  X(Init) X(DeviceGetCount) X(DeviceGet) X(DeviceGetAttribute) X(DevicePrimaryCtxRetain) \
  X(DevicePrimaryCtxRelease) X(CtxPushCurrent) X(CtxPopCurrent) X(MemGetInfo) X(MemAlloc) \
  X(MemFree) X(MemcpyAsync) X(MemsetD8Async) X(MemHostRegister) X(MemHostUnregister) \
  X(MemAddressReserve) X(MemAddressFree) X(MemCreate) X(MemRelease) X(MemMap) X(MemUnmap) \
  X(MemSetAccess) X(MemGetAllocationGranularity) X(PointerGetAttribute) X(StreamDestroy) \
  X(StreamSynchronize) X(StreamWaitEvent) X(EventCreate) X(EventDestroy) X(EventRecord) \
  X(EventQuery) X(EventElapsedTime) X(EventSynchronize) X(ModuleLoadData) X(ModuleUnload) \
  X(ModuleGetFunction) X(LaunchKernel) X(GetErrorName) X(GetErrorString) \
  X(MemExportToShareableHandle) X(MemImportFromShareableHandle) X(StreamWriteValue32) \
  X(StreamWaitValue32) X(MemHostGetDevicePointer) X(StreamCreate)
// clang-format on
#define STRATA_CUDA_DECLARE(name) decltype(&::cu##name) name = nullptr;
  STRATA_CUDA_CALLS(STRATA_CUDA_DECLARE)
#undef STRATA_CUDA_DECLARE

  // Null where no driver is installed, or one too old to have all of these.
  static const CudaDriver* find();

  [[noreturn]] void fail(CUresult result, std::string_view call) const;
  void check(CUresult result, std::string_view call) const {
    if (result != CUDA_SUCCESS) fail(result, call);
  }
};

// A device's primary context, which every framework in the process shares.
class CudaContext {
 public:
  CudaContext(const CudaDriver& driver, int index, std::shared_ptr<HostWaits> waits);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  int index() const { return index_; }
  int attribute(CUdevice_attribute attribute) const;
  const std::shared_ptr<HostWaits>& waits() const { return waits_; }

  // Makes the context the calling thread's own for as long as it lives.
  class Scope {
   public:
    explicit Scope(const CudaContext& context);
    // For destructors: a driver that is shutting down already is no error.
    Scope(const CudaContext& context, std::nothrow_t) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const CudaDriver& driver_;
    bool pushed_ = true;
  };

 private:
  const CudaDriver& driver_;
  int index_;
  std::shared_ptr<HostWaits> waits_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// The compiled kernels, loaded into one device's context: finds them by name and launches them.
// Threads: calls from any thread; work goes to the stream that is given. Errors: UsageError for
// element types that a kernel does not have; DeviceError.

// Types of elements that kernels know, by their places in tables: fp64, fp32, fp16, bf16.
inline constexpr std::size_t kKernelTypes = 4;
inline constexpr std::array<const char*, kKernelTypes> kKernelSuffixes = {"f64", "f32", "f16",
                                                                          "bf16"};
// kKernelTypes where there is none.
std::size_t kernel_place_of(DType dtype);
// `first`: the place of the first type that the operation has.
void require_kernel_types(const char* operation, std::size_t first, DType target, DType source);

class CudaModule {
 public:
  static constexpr unsigned kThreads = 256;  // of a block

  explicit CudaModule(std::shared_ptr<const CudaContext> context);
  ~CudaModule();
  CudaModule(const CudaModule&) = delete;
  CudaModule& operator=(const CudaModule&) = delete;

  const CudaContext& context() const { return *context_; }
  // Enough to fill the device several times.
  unsigned blocks_max() const { return blocks_max_; }
  CUfunction find(const std::string& name) const;
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
    void* pointers[] = {&arguments...};
    const auto wanted = static_cast<std::uint64_t>((threads + kThreads - 1) / kThreads);
    const std::uint64_t blocks =
        std::min({wanted, std::uint64_t{blocks_max_}, std::uint64_t{blocks_most}});
    launch_grid(function, {static_cast<unsigned>(blocks), 1, kThreads}, stream, pointers);
  }
  // A grid of its own.
  struct Grid {
    unsigned x = 1;
    unsigned y = 1;
    unsigned threads = 1;  // of a block
  };
  void launch_grid(CUfunction function, const Grid& grid, CUstream stream, void** arguments) const;

 private:
  std::shared_ptr<const CudaContext> context_;
  CUmodule module_ = nullptr;
  unsigned blocks_max_ = 0;
};

// Streams and events of a CUDA device.
// Threads: device.h. Ownership: each keeps the context alive; a stream may go while its work runs.
class CudaStream : public Stream {
 public:
  explicit CudaStream(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {}

  virtual CUstream handle() const = 0;
  std::unique_ptr<Event> record() override;
  std::unique_ptr<TimedEvent> record_timed() override;
  void wait_for(Event& event) override;
  void synchronize() override;

 protected:
  const CudaContext& context() const { return *context_; }

 private:
  void mark(CUevent event);

  std::shared_ptr<const CudaContext> context_;
};

// A stream of the engine's own; no other stream waits for it unless wait_for() says so.
std::unique_ptr<CudaStream> make_cuda_stream(std::shared_ptr<const CudaContext> context);

// Whatever stream `find` names at each call; null: the default stream.
std::unique_ptr<CudaStream> make_compute_stream(std::shared_ptr<const CudaContext> context,
                                                std::function<void*()> find);

}  // namespace strata::device
