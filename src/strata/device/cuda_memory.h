// Memory of a CUDA device, and host memory pinned for it.
//
// CudaMemory is one block of the driver's. CudaGrowableMemory is a range of addresses that physical
// memory is mapped into piece by piece; what it shares CudaPeerMapping maps in another process.
// CudaHostMemory is made of huge pages that several threads touch, and registered afterwards, which
// takes a tenth of the time that the driver's own allocation of pinned memory takes. Threads: one
// at a time each. Ownership: each keeps context, ledger and budget alive and gives back what it
// holds on destruction; freeing device memory waits for the device's running work. Units:
// CudaMemory charges the bytes asked for, CudaGrowableMemory the whole pieces that it maps. Errors:
// OutOfMemoryError; UsageError for growth beyond the range.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "strata/device/cuda_driver.h"
#include "strata/device/device.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/ledger.h"

namespace strata::device {

// State that all memory of one device shares.
struct CudaPool {
  std::shared_ptr<const CudaContext> context;
  std::shared_ptr<memory::Ledger> ledger;
  std::shared_ptr<memory::ByteBudget> budget;  // null: no bound but the driver's
  std::function<void()> release_unused;        // of CudaDeviceOptions

  memory::ByteBudget::Hold take_part(Bytes bytes, std::string_view what) const;
  [[noreturn]] void throw_out_of_memory(Bytes wanted, std::string_view what,
                                        std::string_view reason) const;
  Bytes free_bytes() const;
  // `call` asks the driver for memory; once more where others can give some back.
  template <typename Call>
  CUresult allocated_by(Call&& call) const {
    const CUresult result = call();
    if (result != CUDA_ERROR_OUT_OF_MEMORY || !release_unused) return result;
    release_unused();
    return call();
  }
};

class CudaMemory final : public Memory {
 public:
  // `kind` nullopt: the caller charges it.
  CudaMemory(const CudaPool& pool, Bytes bytes, std::optional<memory::Kind> kind);
  ~CudaMemory() override;
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  std::span<std::byte> bytes() override { return bytes_; }

 private:
  std::shared_ptr<const CudaContext> context_;
  std::span<std::byte> bytes_;
  memory::ByteBudget::Hold hold_;
  memory::Charge charge_;
};

class CudaHostMemory final : public HostMemory {
 public:
  CudaHostMemory(const CudaPool& pool, Bytes bytes, memory::Kind kind);
  ~CudaHostMemory() override;
  CudaHostMemory(const CudaHostMemory&) = delete;
  CudaHostMemory& operator=(const CudaHostMemory&) = delete;
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
                     Pieces pieces = Pieces::kPrivate);
  ~CudaGrowableMemory() override;
  CudaGrowableMemory(const CudaGrowableMemory&) = delete;
  CudaGrowableMemory& operator=(const CudaGrowableMemory&) = delete;

  std::byte* base() override;
  Bytes reserved() const override { return reserved_; }
  Bytes backed() const override { return backed_; }
  void grow_to(Bytes bytes) override;
  void release() override;
  std::size_t pieces() const override { return pieces_.size(); }
  SharedHandle piece(std::size_t index) const override;

 private:
  struct Piece {
    CUmemGenericAllocationHandle handle = 0;
    Bytes bytes;
    memory::ByteBudget::Hold hold;
  };
  void map_piece(Bytes bytes);

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
  CudaPeerMapping(std::shared_ptr<const CudaContext> context, Bytes bytes);
  ~CudaPeerMapping() override;
  CudaPeerMapping(const CudaPeerMapping&) = delete;
  CudaPeerMapping& operator=(const CudaPeerMapping&) = delete;

  const std::byte* base() const override;
  Bytes mapped() const override { return mapped_; }
  std::size_t pieces() const override { return handles_.size(); }
  void add(SharedHandle piece) override;

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
  CudaHostRegistration(std::shared_ptr<const CudaContext> context, std::span<std::byte> host);
  ~CudaHostRegistration() override;
  CudaHostRegistration(const CudaHostRegistration&) = delete;
  CudaHostRegistration& operator=(const CudaHostRegistration&) = delete;

 private:
  std::shared_ptr<const CudaContext> context_;
  std::byte* host_;
};

}  // namespace strata::device
