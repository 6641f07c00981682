#include "strata/torch/model/model_runtime.h"

#include <utility>

#include "strata/torch/base/placement.h"

namespace strata::torch {

ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives) {
  std::shared_ptr<device::Device> device = make_device(place, threads);
  return {place, std::move(collectives), std::move(device), nullptr, {}, threads};
}

}  // namespace strata::torch
