#include "strata/engine/config/precision_config.h"

#include <cmath>
#include <string>
#include <string_view>

#include "strata/base/error.h"
#include "strata/engine/config/settings.h"

namespace strata::engine {
namespace {

DType dtype_or_fp32(const Settings& s, std::string_view path) {
  std::optional<DType> dtype;
  s.read(path, dtype);
  return dtype.value_or(DType::kFloat32);
}

// 2 to initial_scale_power: the power is checked to be small.
LossScaleParams read_loss_scale(const Settings& s, bool fp16) {
  const LossScaleParams scale{
      .fixed = s.number("fp16.loss_scale"),
      .initial = std::ldexp(1.0, static_cast<int>(s.integer("fp16.initial_scale_power"))),
      .window = s.integer("fp16.loss_scale_window"),
      .hysteresis = s.integer("fp16.hysteresis"),
      .consecutive_hysteresis = s.flag("fp16.consecutive_hysteresis"),
      .minimum = static_cast<double>(s.integer("fp16.min_loss_scale"))};
  if (!fp16) return {};
  LossScaler check(scale);  // refuses a dynamic scale without window or minimum
  return scale;
}

// As torch.amp.GradScaler has it by default, but that it does not fall below 1.
constexpr LossScaleParams kAutocastScale{
    .fixed = 0.0, .initial = 65536.0, .window = 2000, .hysteresis = 1};

std::optional<DType> read_autocast(const Settings& s, std::optional<DType> param_dtype) {
  const bool enabled = s.flag("torch_autocast.enabled");
  const auto name = s.maybe<std::string>("torch_autocast.dtype");
  if (!enabled) return std::nullopt;
  if (!name)
    throw ConfigError(
        "torch_autocast.dtype: wanted \"bf16\" or \"fp16\", the type in which safe operations "
        "compute; found none");
  const auto dtype = dtype_from_config(name->starts_with("torch.") ? name->substr(6) : *name);
  STRATA_ASSERT(dtype.has_value());
  if (param_dtype && *param_dtype != *dtype)
    throw ConfigError(
        "torch_autocast.dtype: contradicts {}.enabled, by which parameters are of another type; "
        "name one type in both, or leave one section out; found {} and {}",
        *param_dtype == DType::kFloat16 ? "fp16" : "bf16", name_of(*dtype), name_of(*param_dtype));
  return dtype;
}

void read_narrow_states(const Settings& s, bool bf16, PrecisionConfig& precision) {
  const bool masters = s.flag("bf16.bf16_master_weights_and_grads");
  const bool states = s.flag("bf16.bf16_optimizer_states");
  if (masters && !bf16)
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads: is for bf16 weights; set bf16.enabled to true or "
        "remove the key; found bf16.enabled false");
  if (states && !masters)
    throw ConfigError(
        "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads; set that to true, "
        "too, or remove the key; found false");
  precision.rounds_masters = masters;
  if (masters && !s.maybe<std::string>("data_types.grad_accum_dtype"))
    precision.grad_accum_dtype = DType::kBFloat16;
  if (states) precision.moment_dtype = DType::kBFloat16;
}

}  // namespace

PrecisionConfig read_precision(const Settings& s) {
  const bool bf16 = s.flag("bf16.enabled");
  const bool fp16 = s.flag("fp16.enabled");
  if (bf16 && fp16)
    throw ConfigError(
        "bf16.enabled: contradicts fp16.enabled, since parameters have one element type; set one "
        "of the two to false; found both true");
  const bool skip_bf16 = s.flag("bf16.check_grad_overflow");
  const bool cast = s.flag("fp16.auto_cast");
  const auto param_dtype = bf16   ? std::optional(DType::kBFloat16)
                           : fp16 ? std::optional(DType::kFloat16)
                                  : std::nullopt;
  const auto autocast = read_autocast(s, param_dtype);
  const LossScaleParams of_fp16 = read_loss_scale(s, fp16);
  const bool scaled_for_autocast = !param_dtype && autocast == DType::kFloat16;
  PrecisionConfig precision{.param_dtype = param_dtype,
                            .grad_accum_dtype = dtype_or_fp32(s, "data_types.grad_accum_dtype"),
                            .communication_dtype = dtype_or_fp32(s, "communication_data_type"),
                            .autocast = autocast,
                            .cast_inputs = fp16 && cast,
                            .skip_on_overflow = fp16 || scaled_for_autocast || (bf16 && skip_bf16),
                            .loss_scale = scaled_for_autocast ? kAutocastScale : of_fp16};
  read_narrow_states(s, bf16, precision);
  return precision;
}

void require_no_late_factor(const PrecisionConfig& precision, double clipping, bool counts) {
  const auto fail = [](std::string_view found, std::string_view remedy) {
    throw ConfigError(
        "strata.update_at: \"backward\" updates weights before the step's last gradient is there, "
        "so nothing may scale or skip the update; {}, or write \"step\"; found {}",
        remedy, found);
  };
  if (clipping > 0.0)
    fail(fmt::format("gradient_clipping: {}", clipping), "write \"gradient_clipping\": 0");
  if (precision.scales_loss()) fail("a loss scale of fp16", "train in bf16 or fp32");
  if (precision.skip_on_overflow)
    fail("bf16.check_grad_overflow: true", "write \"bf16\": {\"check_grad_overflow\": false}");
  if (!counts)
    fail("managed_gradient_accumulation: false", "write true, so that the engine counts passes");
}

}  // namespace strata::engine
