// Streams and events of a CUDA device.
// Threads: device.h. Ownership: each keeps the context alive; a stream may go while its work runs.
#pragma once

#include <functional>
#include <memory>

#include "strata/device/cuda_driver.h"
#include "strata/device/device.h"

namespace strata::device {

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

// A stream of the engine's own, which no other waits for unless told.
std::unique_ptr<CudaStream> make_cuda_stream(std::shared_ptr<const CudaContext> context);

// Whatever stream `find` names at each call; null: the default stream.
std::unique_ptr<CudaStream> make_compute_stream(std::shared_ptr<const CudaContext> context,
                                                std::function<void*()> find);

}  // namespace strata::device
