#include "strata/device/cuda_device.h"

#include <fmt/core.h>

#include <future>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/device/cuda_driver.h"
#include "strata/device/cuda_kernels.h"
#include "strata/device/cuda_memory.h"

namespace strata::device {
namespace {

// Host memory that a coming allocate_host() will return.
struct ExpectedHost {
  Bytes bytes;
  memory::Kind kind;
  std::future<std::unique_ptr<HostMemory>> memory;
};

class CudaDevice final : public CudaKernels {
 public:
  CudaDevice(const std::shared_ptr<const CudaContext>& context, const CudaDeviceOptions& options)
      : CudaKernels(context),
        context_(context),
        pool_{context_, options.ledger ? options.ledger : std::make_shared<memory::Ledger>(),
              options.release_unused},
        compute_stream_(std::make_unique<ComputeStream>(context_, options.compute_stream)) {}

  std::string_view name() const override { return "cuda"; }
  const std::shared_ptr<memory::Ledger>& ledger() const override { return pool_.ledger; }
  bool runs_ahead() const override { return true; }
  const std::shared_ptr<HostWaits>& host_waits() const override { return context_->waits(); }

  std::unique_ptr<Memory> allocate(Bytes bytes, memory::Kind kind) override {
    return std::make_unique<CudaMemory>(pool_, bytes, kind);
  }
  std::unique_ptr<Memory> allocate_uncharged(Bytes bytes) override {
    return std::make_unique<CudaMemory>(pool_, bytes, std::nullopt);
  }
  std::unique_ptr<GrowableMemory> reserve(Bytes bytes, memory::Kind kind) override {
    return std::make_unique<CudaGrowableMemory>(pool_, bytes, kind);
  }
  std::unique_ptr<GrowableMemory> reserve_shared(Bytes bytes, memory::Kind kind) override {
    return std::make_unique<CudaGrowableMemory>(pool_, bytes, kind,
                                                CudaGrowableMemory::Pieces::kShared);
  }
  std::unique_ptr<PeerMapping> reserve_mapping(Bytes bytes) override {
    return std::make_unique<CudaPeerMapping>(context_, bytes);
  }
  std::unique_ptr<HostRegistration> pin(std::span<std::byte> host) override {
    return std::make_unique<CudaHostRegistration>(context_, host);
  }
  std::unique_ptr<HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override {
    std::optional<ExpectedHost> expected;
    {
      const std::lock_guard lock(expected_mutex_);
      if (expected_ && expected_->bytes == bytes && expected_->kind == kind)
        expected = std::exchange(expected_, std::nullopt);
    }
    if (expected) {
      try {
        return expected->memory.get();
      } catch (const Error&) {
        // There was no memory then: there may be some now, and else it is this call that fails.
      }
    }
    return std::make_unique<CudaHostMemory>(pool_, bytes, kind);
  }
  void expect_host(Bytes bytes, memory::Kind kind) override {
    const std::lock_guard lock(expected_mutex_);
    expected_.reset();  // before the next is begun
    try {
      expected_ = ExpectedHost{bytes, kind, std::async(std::launch::async, [this, bytes, kind] {
                                 return std::unique_ptr<HostMemory>(
                                     std::make_unique<CudaHostMemory>(pool_, bytes, kind));
                               })};
    } catch (const std::system_error&) {
      return;  // the system has no thread for it: allocate_host() makes it
    }
  }
  Bytes free_bytes() const override { return pool_.free_bytes(); }
  bool host_accessible(const std::byte* pointer) const override {
    const unsigned kind = kind_of(pointer);
    return kind == 0 || kind == CU_MEMORYTYPE_HOST;
  }
  bool device_accessible(const std::byte* pointer) const override { return kind_of(pointer) != 0; }

  std::unique_ptr<Stream> create_stream() override { return std::make_unique<OwnStream>(context_); }
  Stream& compute_stream() override { return *compute_stream_; }

  void copy(std::span<std::byte> target, std::span<const std::byte> source,
            Stream& stream) override {
    STRATA_ASSERT(target.size() == source.size());
    if (target.empty()) return;
    context_->call("cuMemcpyAsync", &CudaDriver::MemcpyAsync, as_address(target.data()),
                   as_address(source.data()), target.size(), CudaStream::handle_of(stream));
  }
  void fill_zero(std::span<std::byte> target, Stream& stream) override {
    if (target.empty()) return;
    context_->call("cuMemsetD8Async", &CudaDriver::MemsetD8Async, as_address(target.data()),
                   static_cast<unsigned char>(0), target.size(), CudaStream::handle_of(stream));
  }
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, Stream& stream) override {
    const auto pieces_of = [piece](std::span<const std::byte> run) {
      return (run.size() + piece.size() - 1) / piece.size();
    };
    std::size_t pieces = 0;
    for (const auto run : runs) pieces += pieces_of(run);
    std::vector<kernels::Fingerprint> result(pieces);
    if (result.empty()) return result;
    const std::span<std::byte> host = std::as_writable_bytes(std::span(result));
    CudaMemory memory(pool_, Bytes(host.size()), memory::Kind::kWorkspace);
    const std::span<std::byte> sums = memory.bytes();
    fill_zero(sums, stream);
    std::byte* next = sums.data();
    for (const auto run : runs) {
      add_fingerprints(next, run, piece, CudaStream::handle_of(stream));
      next += pieces_of(run) * sizeof(kernels::Fingerprint);
    }
    copy(host, sums, stream);
    stream.synchronize();
    return result;
  }
  void sums_of_squares(std::span<double> sums, std::span<const std::span<const float>> gradients,
                       Stream& stream) override {
    STRATA_ASSERT(sums.size() == gradients.size());
    const Bytes needed = bytes_of(Numel(chunks_of(gradients)), DType::kFloat64);
    const std::lock_guard lock(chunk_sums_mutex_);
    std::unique_ptr<CudaMemory>& chunks = chunk_sums_[CudaStream::handle_of(stream)];
    if (chunks == nullptr || Bytes(chunks->bytes().size()) < needed) {
      stream.synchronize();  // what was queued before uses it
      chunks.reset();
      chunks = std::make_unique<CudaMemory>(pool_, needed, memory::Kind::kWorkspace);
    }
    queue_squares(sums.data(), reinterpret_cast<double*>(chunks->bytes().data()), gradients,
                  CudaStream::handle_of(stream));
  }
  void write_flag(Flag& flag, std::uint32_t value, Stream& stream) override {
    const CudaContext::Scope scope(*context_);
    driver().check(driver().StreamWriteValue32(CudaStream::handle_of(stream), address_of_flag(flag),
                                               value, CU_STREAM_WRITE_VALUE_DEFAULT),
                   "cuStreamWriteValue32");
  }
  void wait_flag(const Flag& flag, std::uint32_t value, Stream& stream) override {
    const CudaContext::Scope scope(*context_);
    driver().check(driver().StreamWaitValue32(CudaStream::handle_of(stream), address_of_flag(flag),
                                              value, CU_STREAM_WAIT_VALUE_GEQ),
                   "cuStreamWaitValue32");
  }

 private:
  const CudaDriver& driver() const { return context_->driver(); }
  // A CUmemorytype; 0 for ordinary host memory, of which the driver knows nothing.
  unsigned kind_of(const std::byte* pointer) const {
    const CudaContext::Scope scope(*context_);
    unsigned type = 0;
    const CUresult result =
        driver().PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, as_address(pointer));
    return result == CUDA_SUCCESS ? type : 0;
  }
  CUdeviceptr address_of_flag(const Flag& flag) const {
    CUdeviceptr address = 0;
    driver().check(driver().MemHostGetDevicePointer(&address, const_cast<Flag*>(&flag), 0),
                   "cuMemHostGetDevicePointer");
    return address;
  }

  const std::shared_ptr<const CudaContext> context_;
  const CudaPool pool_;
  const std::unique_ptr<CudaStream> compute_stream_;
  std::mutex chunk_sums_mutex_;
  std::map<CUstream, std::unique_ptr<CudaMemory>> chunk_sums_;  // scratch; guarded
  std::mutex expected_mutex_;
  std::optional<ExpectedHost> expected_;  // guarded; the last: it is being made with what is above
};

}  // namespace

bool cuda_is_built() {
  return true;
}

int cuda_device_count() {
  const CudaDriver* driver = CudaDriver::find();
  int count = 0;
  return driver != nullptr && driver->DeviceGetCount(&count) == CUDA_SUCCESS ? count : 0;
}

CudaFacts cuda_facts() {
  CudaFacts facts{CUDA_VERSION, 0, CudaDriver::loaded().absence, {}};
  const CudaDriver* const driver = CudaDriver::find();
  if (driver == nullptr) return facts;
  const auto ask = [&](CUresult result) {
    if (result != CUDA_SUCCESS) facts.absence = "the CUDA driver says: " + driver->words(result);
  };
  ask(driver->DriverGetVersion(&facts.driver));
  facts.gpus.resize(static_cast<std::size_t>(cuda_device_count()));
  for (int index = 0; CudaFacts::Gpu & gpu : facts.gpus) {
    CUdevice device = 0;
    ask(driver->DeviceGet(&device, index));
    gpu.name.resize(128);
    ask(driver->DeviceGetName(gpu.name.data(), static_cast<int>(gpu.name.size()), device));
    gpu.name.resize(gpu.name.find('\0'));
    ask(driver->DeviceGetAttribute(gpu.capability.data(),
                                   CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    ask(driver->DeviceGetAttribute(gpu.capability.data() + 1,
                                   CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    std::size_t bytes = 0;
    ask(driver->DeviceTotalMem(&bytes, device));
    gpu.memory = Bytes(bytes);
    for (int other = 0; other < static_cast<int>(facts.gpus.size()); ++other) {
      CUdevice peer = 0;
      int reached = 0;
      ask(driver->DeviceGet(&peer, other));
      if (other != index) ask(driver->DeviceCanAccessPeer(&reached, device, peer));
      if (reached != 0) gpu.peers.push_back(other);
    }
    ++index;
  }
  return facts;
}

std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& options) {
  const int count = cuda_device_count();
  if (options.index < 0 || options.index >= count)
    throw UsageError(
        "there is no CUDA device {}: {}", options.index,
        CudaDriver::find() == nullptr
            ? CudaDriver::loaded().absence
            : fmt::format("this process sees {} of them; see CUDA_VISIBLE_DEVICES", count));
  auto waits = options.waits ? options.waits : std::make_shared<HostWaits>();
  const auto context =
      std::make_shared<const CudaContext>(*CudaDriver::find(), options.index, std::move(waits));
  return std::make_unique<CudaDevice>(context, options);
}

}  // namespace strata::device
