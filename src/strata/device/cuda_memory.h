// Memory of a CUDA device, and host memory pinned for it.
//
// CudaMemory is one block of the driver's. CudaGrowableMemory is a range of addresses that physical
// memory is mapped into piece by piece; what it shares CudaPeerMapping maps in another process.
// CudaHostMemory is made of huge pages that several threads touch, and registered afterwards, which
// takes a tenth of the time that the driver's own allocation of pinned memory takes. Threads: one
// at a time each. Ownership: each keeps context and ledger alive and gives back what it
// holds on destruction; freeing device memory waits for the device's running work. Units:
// CudaMemory charges the bytes asked for, CudaGrowableMemory the whole pieces that it maps. Errors:
// OutOfMemoryError; UsageError for growth beyond the range.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/device/cuda_driver.h"
#include "strata/device/device.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/ledger.h"

namespace strata::device {

// No driver maps in larger granules.
inline constexpr Bytes kGranuleMax = 2_MiB;
// Host memory above this is touched by several threads.
inline constexpr Bytes kTouchAlone = 4_MiB;
inline constexpr unsigned kTouchThreads = 16;

inline std::byte* as_pointer(CUdeviceptr address) {
  return reinterpret_cast<std::byte*>(address);  // one address space
}

inline CUdeviceptr as_address(const std::byte* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

// State that all memory of one device shares.
struct CudaPool {
  std::shared_ptr<const CudaContext> context;
  std::shared_ptr<memory::Ledger> ledger;
  std::function<void()> release_unused;  // of CudaDeviceOptions

  [[noreturn]] void throw_out_of_memory(Bytes wanted, std::string_view what,
                                        std::string_view reason) const {
    throw OutOfMemoryError(
        "device cuda:{} is out of memory ({}): {} wanted, {}; shard over more ranks, offload, or "
        "end other programs on this device; held: {}",
        context->index(), what, to_string(wanted), reason, ledger->report());
  }
  Bytes free_bytes() const {
    const CudaContext::Scope scope(*context);
    std::size_t free = 0;
    std::size_t total = 0;
    context->driver().check(context->driver().MemGetInfo(&free, &total), "cuMemGetInfo");
    return Bytes(free);
  }
  // `call` asks the driver for memory; once more where others can give some back.
  template <typename Call>
  CUresult allocated_by(Call&& call) const {
    const CUresult result = call();
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !release_unused) return result;
    release_unused();
    return call();
  }
};

inline memory::HostBuffer touched_buffer(const CudaPool& pool, Bytes bytes, memory::Kind kind) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  ThreadPool threads(bytes > kTouchAlone ? static_cast<int>(std::min(cores, kTouchThreads)) : 1);
  return memory::HostBuffer(bytes, {.ledger = pool.ledger, .kind = kind, .touch = &threads});
}

// Maps physical memory at a reserved address, for this device to read and write. A failure gives
// the handle back. `whose`: in errors; `zeroes`: whether to fill it with them.
inline void map_at(const CudaContext& context, CUdeviceptr address, Bytes bytes,
                   CUmemGenericAllocationHandle handle, std::string_view whose, bool zeroes) {
  const CudaDriver& cuda = context.driver();
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, context.index()},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUresult mapped = cuda.MemMap(address, bytes.size(), 0, handle, 0);
  CUresult usable = mapped;
  if (usable == CUDA_SUCCESS) usable = cuda.MemSetAccess(address, bytes.size(), &access, 1);
  if (usable == CUDA_SUCCESS && zeroes)
    usable = cuda.MemsetD8Async(address, 0, bytes.size(), CU_STREAM_LEGACY);
  if (usable == CUDA_SUCCESS) return;
  if (mapped == CUDA_SUCCESS) cuda.MemUnmap(address, bytes.size());
  cuda.MemRelease(handle);
  cuda.fail(usable, fmt::format("{}{}", mapped == usable ? "cuMemMap" : "cuMemSetAccess", whose));
}

class CudaMemory final : public Memory {
 public:
  // `kind` nullopt: the caller charges it.
  CudaMemory(const CudaPool& pool, Bytes bytes, std::optional<memory::Kind> kind)
      : context_(pool.context) {
    STRATA_ASSERT(bytes.value >= 0);
    if (bytes.value > 0) {
      const CudaContext::Scope scope(*context_);
      CUdeviceptr address = 0;
      const CUresult result =
          pool.allocated_by([&] { return context_->driver().MemAlloc(&address, bytes.size()); });
      if (result == CUDA_ERROR_OUT_OF_MEMORY)
        pool.throw_out_of_memory(
            bytes, kind ? memory::name_of(*kind) : "shared buffers",
            fmt::format("the driver has {} free", to_string(pool.free_bytes())));
      context_->driver().check(result, "cuMemAlloc");
      bytes_ = {as_pointer(address), bytes.size()};
    }
    if (kind) charge_ = memory::Charge(pool.ledger, memory::Tier::kDevice, *kind, bytes);
  }
  ~CudaMemory() override {
    if (bytes_.empty()) return;
    context_->waits()->note();
    context_->end(&CudaDriver::MemFree, as_address(bytes_.data()));
  }
  std::span<std::byte> bytes() override { return bytes_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  std::span<std::byte> bytes_;
  memory::Charge charge_;
};

class CudaHostMemory final : public HostMemory {
 public:
  CudaHostMemory(const CudaPool& pool, Bytes bytes, memory::Kind kind)
      : context_(pool.context), buffer_(touched_buffer(pool, bytes, kind)) {
    if (bytes.value == 0) return;
    const CudaContext::Scope scope(*context_);
    const CUresult result = context_->driver().MemHostRegister(
        buffer_.data(), buffer_.size().size(), CU_MEMHOSTREGISTER_PORTABLE);
    pinned_ = result == CUDA_SUCCESS;  // refused: a limit on locked memory
  }
  ~CudaHostMemory() override {
    if (!pinned_) return;
    context_->waits()->note();
    context_->end(&CudaDriver::MemHostUnregister, buffer_.data());
  }
  std::span<std::byte> bytes() override { return buffer_.bytes(); }
  bool pinned() const override { return pinned_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  memory::HostBuffer buffer_;
  bool pinned_ = false;
};

class CudaGrowableMemory final : public GrowableMemory {
 public:
  enum class Pieces { kPrivate, kShared };
  CudaGrowableMemory(CudaPool pool, Bytes bytes, memory::Kind kind,
                     Pieces pieces = Pieces::kPrivate)
      : pool_(std::move(pool)),
        kind_(kind),
        charge_(pool_.ledger, memory::Tier::kDevice, kind, Bytes()) {
    STRATA_ASSERT(bytes.value >= 0);
    const CudaContext& context = *pool_.context;
    const CudaDriver& cuda = context.driver();
    if (context.attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0)
      throw DeviceError("the driver of cuda:{} has no virtual memory management", context.index());
    const CudaContext::Scope scope(context);
    property_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property_.location = {CU_MEM_LOCATION_TYPE_DEVICE, context.index()};
    if (pieces == Pieces::kShared) {
      if (context.attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0)
        throw DeviceError("the driver of cuda:{} does not share memory by file", context.index());
      property_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    std::size_t granule = 0;
    cuda.check(
        cuda.MemGetAllocationGranularity(&granule, &property_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
    granule_ = Bytes(static_cast<std::int64_t>(granule));
    reserved_ = align_up(bytes, granule_);
    if (reserved_.value == 0) return;
    cuda.check(cuda.MemAddressReserve(&base_, reserved_.size(), 0, 0, 0), "cuMemAddressReserve");
  }
  ~CudaGrowableMemory() override {
    if (base_ == 0) return;
    release();
    pool_.context->end(&CudaDriver::MemAddressFree, base_, reserved_.size());
  }

  std::byte* base() override { return as_pointer(base_); }
  Bytes reserved() const override { return reserved_; }
  Bytes backed() const override { return backed_; }
  void grow_to(Bytes bytes) override {
    STRATA_ASSERT(bytes.value >= 0);
    if (bytes > reserved_)
      throw UsageError(
          "growable memory ({}) cannot grow beyond the range that was reserved: reserve as much as "
          "it may ever need; wanted {} B, reserved {} B",
          memory::name_of(kind_), bytes.value, reserved_.value);
    const Bytes target = align_up(bytes, granule_);
    if (target <= backed_) return;
    // All or nothing: what the driver has not got must not be half mapped.
    Bytes free = pool_.free_bytes();
    if (target - backed_ > free && pool_.release_unused) {
      pool_.release_unused();
      free = pool_.free_bytes();
    }
    if (target - backed_ > free)
      pool_.throw_out_of_memory(target - backed_, memory::name_of(kind_),
                                fmt::format("{} free", to_string(free)));
    const CudaContext::Scope scope(*pool_.context);
    map_piece(target - backed_);
    pool_.context->waits()->note();
    pool_.context->driver().check(pool_.context->driver().StreamSynchronize(CU_STREAM_LEGACY),
                                  "cuStreamSynchronize");
  }
  void release() override {
    if (backed_.value == 0) return;
    const CudaContext::Scope scope(*pool_.context, std::nothrow);
    const CudaDriver& cuda = pool_.context->driver();
    pool_.context->waits()->note();
    cuda.MemUnmap(base_, backed_.size());
    for (const Piece& piece : pieces_) cuda.MemRelease(piece.handle);
    pieces_.clear();
    backed_ = Bytes();
    charge_ = memory::Charge(pool_.ledger, memory::Tier::kDevice, kind_, Bytes());
  }
  std::size_t pieces() const override { return pieces_.size(); }
  SharedHandle piece(std::size_t index) const override {
    const Piece& piece = pieces_.at(index);
    int descriptor = -1;
    pool_.context->call("cuMemExportToShareableHandle", &CudaDriver::MemExportToShareableHandle,
                        &descriptor, piece.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ULL);
    return {FileDescriptor(descriptor), Bytes(), piece.bytes};
  }

 private:
  struct Piece {
    CUmemGenericAllocationHandle handle = 0;
    Bytes bytes;
  };
  void map_piece(Bytes bytes) {
    const CudaDriver& cuda = pool_.context->driver();
    Piece piece{0, bytes};
    pieces_.reserve(pieces_.size() + 1);
    const CUresult created = pool_.allocated_by(
        [&] { return cuda.MemCreate(&piece.handle, bytes.size(), &property_, 0); });
    if (created == CUDA_ERROR_OUT_OF_MEMORY)
      pool_.throw_out_of_memory(bytes, memory::name_of(kind_), "the driver has no more");
    cuda.check(created, "cuMemCreate");
    map_at(*pool_.context, base_ + backed_.size(), bytes, piece.handle, "", /*zeroes=*/true);
    pieces_.push_back(std::move(piece));
    backed_ += bytes;
    charge_.grow(bytes);
  }

  CudaPool pool_;
  memory::Kind kind_;
  CUmemAllocationProp property_{};
  Bytes granule_;
  Bytes reserved_;
  Bytes backed_;
  CUdeviceptr base_ = 0;  // 0 when reserved_ is 0
  std::vector<Piece> pieces_;
  memory::Charge charge_;
};

class CudaPeerMapping final : public PeerMapping {
 public:
  CudaPeerMapping(std::shared_ptr<const CudaContext> context, Bytes bytes)
      : context_(std::move(context)), reserved_(align_up(std::max(bytes, Bytes(1)), kGranuleMax)) {
    context_->call("cuMemAddressReserve", &CudaDriver::MemAddressReserve, &base_, reserved_.size(),
                   std::size_t{0}, CUdeviceptr{0}, 0ULL);
  }
  ~CudaPeerMapping() override {
    const CudaContext::Scope scope(*context_, std::nothrow);
    const CudaDriver& cuda = context_->driver();
    if (mapped_.value > 0) {
      context_->waits()->note();
      cuda.MemUnmap(base_, mapped_.size());
    }
    for (const CUmemGenericAllocationHandle handle : handles_) cuda.MemRelease(handle);
    cuda.MemAddressFree(base_, reserved_.size());
  }

  const std::byte* base() const override { return as_pointer(base_); }
  Bytes mapped() const override { return mapped_; }
  std::size_t pieces() const override { return handles_.size(); }
  void add(SharedHandle piece) override {
    STRATA_ASSERT(mapped_ + piece.bytes <= reserved_);
    const CudaContext::Scope scope(*context_);
    const CudaDriver& cuda = context_->driver();
    handles_.reserve(handles_.size() + 1);
    CUmemGenericAllocationHandle handle = 0;
    auto* const descriptor =
        reinterpret_cast<void*>(static_cast<std::uintptr_t>(piece.descriptor.get()));
    cuda.check(cuda.MemImportFromShareableHandle(&handle, descriptor,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
    map_at(*context_, base_ + mapped_.size(), piece.bytes, handle, " of a peer's memory",
           /*zeroes=*/false);
    handles_.push_back(handle);
    mapped_ += piece.bytes;
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  Bytes reserved_;
  Bytes mapped_;
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;
};

// Registers host memory that the caller owns.
class CudaHostRegistration final : public HostRegistration {
 public:
  CudaHostRegistration(std::shared_ptr<const CudaContext> context, std::span<std::byte> host)
      : context_(std::move(context)), host_(host.data()) {
    context_->call("cuMemHostRegister", &CudaDriver::MemHostRegister, host_, host.size(),
                   unsigned{CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP});
  }
  ~CudaHostRegistration() override {
    context_->waits()->note();
    context_->end(&CudaDriver::MemHostUnregister, host_);
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  std::byte* host_;
};

}  // namespace strata::device
