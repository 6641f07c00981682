// The losses of tokens over a vocabulary, and their gradients, in the memory of logits.
#include "bindings.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::python {
namespace {

// Works on tensors of one device, on torch's current stream there. It needs no engine.
// Threads: calls one at a time. Errors: UsageError for tensors that do not fit.
class VocabularyLosses {
 public:
  // `world_size`: the number of ranks, which decides the number of threads on the host.
  VocabularyLosses(c10::Device place, int world_size)
      : device_(torch::make_device(place, torch::host_threads(std::nullopt, world_size))) {}

  // kernels::vocabulary_losses(); logits [rows, columns], labels and losses [rows].
  void compute(const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& losses,
               std::int64_t ignored, double scale, double softcap, bool gradients) {
    const auto fits = [&](const at::Tensor& tensor, c10::ScalarType type) {
      return tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous() &&
             tensor.size(0) == logits.size(0) && tensor.device() == logits.device();
    };
    const c10::ScalarType type = logits.scalar_type();
    const bool known = type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
    if (!known || logits.dim() != 2 || !logits.is_contiguous() || !fits(labels, at::kLong) ||
        !fits(losses, at::kFloat))
      throw UsageError(
          "wanted contiguous logits [rows, columns] of fp32, bf16 or fp16, int64 labels and fp32 "
          "losses [rows] of one device; found {}, {} and {}",
          c10::toString(type), c10::toString(labels.scalar_type()),
          c10::toString(losses.scalar_type()));
    device_->vocabulary_losses({.logits = static_cast<std::byte*>(logits.data_ptr()),
                                .dtype = torch::from_scalar_type(type),
                                .rows = logits.size(0),
                                .columns = logits.size(1),
                                .labels = labels.const_data_ptr<std::int64_t>(),
                                .ignored = ignored,
                                .losses = losses.mutable_data_ptr<float>(),
                                .scale = static_cast<float>(scale),
                                .softcap = static_cast<float>(softcap),
                                .gradients = gradients},
                               device_->compute_stream());
  }

 private:
  std::shared_ptr<device::Device> device_;
};

}  // namespace

void bind_losses(py::module_& module) {
  py::class_<VocabularyLosses>(module, "VocabularyLosses")
      .def(py::init<c10::Device, int>(), unlocked)
      .def("__call__", &VocabularyLosses::compute, unlocked);
}

}  // namespace strata::python
