#include "strata/device/cuda_stream.h"

#include "strata/base/error.h"

namespace strata::device {
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
