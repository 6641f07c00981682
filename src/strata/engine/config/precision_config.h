// In which types a configuration computes, keeps and sends things: its sections bf16, fp16,
// torch_autocast and data_types, and communication_data_type. Plain values. Errors: ConfigError
// where settings contradict each other.
#pragma once

#include <optional>

#include "strata/base/dtype.h"
#include "strata/engine/schedule/loss_scaler.h"

namespace strata::engine {

class Settings;

struct PrecisionConfig {
  std::optional<DType> param_dtype;             // under bf16 or fp16; absent: each its own
  DType grad_accum_dtype = DType::kFloat32;     // data_types.grad_accum_dtype
  DType communication_dtype = DType::kFloat32;  // communication_data_type
  bool rounds_masters = false;                  // bf16.bf16_master_weights_and_grads
  DType moment_dtype = DType::kFloat32;         // bf16 by bf16.bf16_optimizer_states
  std::optional<DType> autocast;                // torch_autocast.dtype where it is enabled
  bool cast_inputs = false;                     // fp16.auto_cast
  bool skip_on_overflow = false;                // fp16, or bf16.check_grad_overflow under bf16
  LossScaleParams loss_scale;                   // a fixed 1 unless scales_loss()

  // Gradients are of fp16 somewhere on their way.
  bool scales_loss() const {
    return param_dtype == DType::kFloat16 || (!param_dtype && autocast == DType::kFloat16);
  }
  // The dtype in which a parameter of dtype `own` computes. Dtypes that are no floating type
  // (quantized, packed) stay.
  DType weight_dtype(DType own) const {
    return param_dtype && is_floating(own) ? *param_dtype : own;
  }
};

PrecisionConfig read_precision(const Settings& settings);

// ConfigError if something may scale or skip an update when the step's last gradient has come:
// strata.update_at "backward" updates before that. `counts`: managed_gradient_accumulation.
void require_no_late_factor(const PrecisionConfig& precision, double clipping, bool counts);

}  // namespace strata::engine
