#include "strata/comm/combined/collectives_probe.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

constexpr int kRounds = 4;  // the first one maps memory, and does not count
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Room {
  std::unique_ptr<SharedBuffer> weights;
  std::unique_ptr<SharedBuffer> gradients;
  std::unique_ptr<device::Memory> flat;
  std::unique_ptr<device::Memory> result;
};

template <typename Start>
double seconds_of(Collectives& collectives, device::Device& device, const Start& start) {
  double best = kNever;
  for (int round = 0; round < kRounds; ++round) {
    collectives.barrier();
    device.compute_stream().synchronize();
    const auto begin = std::chrono::steady_clock::now();
    start()->wait();
    device.compute_stream().synchronize();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    if (round > 0) best = std::min(best, spent.count());
  }
  return best;
}

}  // namespace

ProbeTimes probe(Collectives& collectives, device::Device& device, const ProbedDTypes& dtypes) {
  const int world = collectives.world_size();
  const Numel numel(kProbeBytes.value / size_of(dtypes.weights).value / world);  // of a slice
  const bool narrow =
      collectives.traits().sums_in_fp32 && size_of(dtypes.weights) < size_of(dtypes.reduce);
  const DType carried = narrow ? dtypes.weights : dtypes.reduce;
  const Bytes slice = bytes_of(numel, dtypes.weights);
  Room room;
  double refused[] = {0.0};
  try {
    room.weights = collectives.allocate("probe.weights", slice);
    room.gradients = collectives.allocate("probe.gradients", bytes_of(numel, carried) * world);
    room.flat = device.allocate_uncharged(slice * world);
    room.result = device.allocate_uncharged(bytes_of(numel, DType::kFloat32));
  } catch (const OutOfMemoryError&) {
    refused[0] = 1.0;
  }
  collectives.all_reduce(refused, ReduceOp::kMax);
  if (refused[0] != 0.0) return {kNever, kNever};
  for (const auto bytes : {room.weights->local(), room.gradients->local()})
    device.fill_zero(bytes, device.compute_stream());

  double times[] = {0.0, 0.0};
  times[0] = seconds_of(collectives, device, [&] {
    return collectives.all_gather({room.weights.get(), Bytes(), Bytes(), slice}, room.flat->bytes(),
                                  "probe");
  });
  Reduction reduction;
  reduction.source = room.gradients.get();
  reduction.dtype = carried;
  reduction.result = {reinterpret_cast<float*>(room.result->bytes().data()),
                      static_cast<std::size_t>(numel.value)};
  times[1] = seconds_of(collectives, device,
                        [&] { return collectives.reduce_scatter(reduction, "probe"); });
  collectives.all_reduce(times, ReduceOp::kMax);
  collectives.barrier();  // no rank reads the memory that is freed now
  return {times[0], times[1]};
}

}  // namespace strata::comm
