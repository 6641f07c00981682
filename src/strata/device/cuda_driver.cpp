#include "strata/device/cuda_driver.h"

#include <dlfcn.h>
#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

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

}  // namespace strata::device
