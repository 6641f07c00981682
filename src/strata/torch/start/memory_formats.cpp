#include "strata/torch/start/memory_formats.h"

#include <fmt/ranges.h>

#include <optional>

namespace strata::torch {
namespace {

// A parameter without values yet is on the meta device, or of the shape [0].
bool is_permuted(const ModelParameter& parameter, const plan::ParamSpec& spec) {
  if (spec.channels_last) return false;  // it keeps its format
  const at::Tensor& tensor = parameter.variable;
  return tensor.layout() == at::kStrided && tensor.sizes() == at::IntArrayRef(parameter.shape) &&
         !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
}

std::optional<at::MemoryFormat> channels_last_format(const at::Tensor& tensor) {
  for (const at::MemoryFormat format :
       {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
    const bool fits = tensor.dim() == (format == at::MemoryFormat::ChannelsLast ? 4 : 5);
    if (fits && tensor.is_contiguous(format)) return format;
  }
  return std::nullopt;
}

std::string name_of_format(at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast ? "channels_last" : "channels_last_3d";
}

}  // namespace

std::string lost_memory_formats(std::span<const ModelParameter> parameters,
                                std::span<const plan::ParamSpec> specs) {
  const ModelParameter* first = nullptr;
  std::optional<at::MemoryFormat> format;  // the first of convolutions'
  std::size_t count = 0;
  Bytes copied;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!is_permuted(parameters[i], specs[i])) continue;
    const auto found = channels_last_format(parameters[i].variable);
    ++count;
    if (first == nullptr || (found && !format)) first = &parameters[i];
    if (!found) continue;
    if (!format) format = found;
    copied += bytes_of(specs[i].numel(), specs[i].dtype);
  }
  if (first == nullptr) return "";
  const std::string others =
      count == 1 ? "" : fmt::format(", as do {} other parameters", count - 1);
  const std::string text = fmt::format(
      "parameter '{}' has permuted strides ({}){}; the engine keeps the values, but lays all "
      "parameters out contiguous",
      first->name, fmt::join(first->variable.strides(), ", "), others);
  if (!format) return text;
  return text + fmt::format(
                    ". Convolutions run {0} kernels where their input is {0}, so convert the "
                    "input: x.to(memory_format=torch.{0}). torch then copies each such weight at "
                    "each use, in forward and in backward; these weights have {1} together",
                    name_of_format(*format), to_string(copied));
}

}  // namespace strata::torch
