#include "strata/torch/adoption.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/consistency.h"
#include "strata/torch/dtype.h"
#include "strata/torch/fingerprint.h"
#include "strata/torch/placement.h"
#include "strata/torch/value_intake.h"

namespace strata::torch {
namespace {

constexpr Bytes kPiece = kIntakePiece;  // compared, and sent, as one
constexpr Bytes kReleasedAtOnce = 128_MiB;

bool has_own_values(const ModelParameter& parameter) {
  return parameter.has_values && parameter.owner == nullptr;
}

// From models that hold these parameters sharded: one unit of theirs is whole at a time.
void take_over(engine::Engine& engine, ValueIntake& intake,
               const std::vector<ModelParameter>& parameters) {
  // In an order that all ranks share, since the end of each is collective.
  std::vector<std::shared_ptr<ShardedModel>> owners;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (parameter.owner == nullptr) continue;
    const int params[] = {parameter.owner_index};
    parameter.owner->gather(params);
    intake.store(static_cast<int>(i), Numel(),
                 parameter.owner->parameters().full_view(parameter.owner_index));
    parameter.owner->release(params, true);
    if (std::find(owners.begin(), owners.end(), parameter.owner) == owners.end())
      owners.push_back(parameter.owner);
  }
  if (owners.empty()) return;
  engine.collectives().barrier();  // peers have read what is about to go
  for (const auto& owner : owners) owner->destroy(false);
}

std::ptrdiff_t offset(std::size_t index) {
  return static_cast<std::ptrdiff_t>(index);
}

// By parameter, its first piece among those of all parameters that have values; and their number.
std::vector<std::size_t> first_pieces(const std::vector<ModelParameter>& parameters) {
  std::vector<std::size_t> first{0};
  for (const ModelParameter& parameter : parameters) {
    const Bytes bytes(static_cast<std::int64_t>(parameter.variable.nbytes()));
    const std::int64_t pieces = has_own_values(parameter) ? piece_count(bytes, kPiece) : 0;
    first.push_back(first.back() + static_cast<std::size_t>(pieces));
  }
  return first;
}

// XXH3 where every rank has its values on the host: the fastest, and it needs the bytes there.
Fingerprints::Method choose_method(comm::Collectives& collectives,
                                   const std::vector<ModelParameter>& parameters) {
  const bool elsewhere = std::any_of(parameters.begin(), parameters.end(), [](const auto& p) {
    return has_own_values(p) && !p.variable.device().is_cpu();
  });
  double any[] = {elsewhere ? 1.0 : 0.0};
  collectives.all_reduce(any, comm::ReduceOp::kMax);
  return any[0] > 0.0 ? Fingerprints::Method::kAnywhere : Fingerprints::Method::kHost;
}

// Which of a parameter's pieces this rank keeps something of, so that it matters whether they are
// rank 0's: of values on the host its own range, else all, which units that stay whole are filled
// from.
std::vector<bool> pieces_kept(engine::Engine& engine, c10::Device place, int param,
                              const at::Tensor& values) {
  const Bytes bytes(values.nbytes());
  std::vector<bool> kept(static_cast<std::size_t>(piece_count(bytes, kPiece)), true);
  const bool fills_whole = values.device() == place && engine.weights().unit_of(param).whole;
  if (engine.collectives().rank() == 0 || !values.is_cpu() || fills_whole) return kept;
  const auto [begin, end] = engine.weights().owned_range(param);
  const Bytes element(values.element_size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Bytes first = kPiece * static_cast<std::int64_t>(i);
    kept[i] = first < element * end.value && first + kPiece > element * begin.value;
  }
  return kept;
}

// Adds the fingerprints of the pieces that are kept; notes in `looked` which those are.
void add_pieces(Fingerprints& fingerprints, const at::Tensor& values, const std::vector<bool>& kept,
                std::string& looked) {
  for (const bool each : kept) looked.push_back(each ? '1' : '0');
  if (std::find(kept.begin(), kept.end(), false) == kept.end()) {
    fingerprints.add(values);
    return;
  }
  const at::Tensor bytes = values.view({-1}).view(at::kByte);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Bytes first = kPiece * static_cast<std::int64_t>(i);
    const Bytes count = std::min(kPiece, Bytes(bytes.nbytes()) - first);
    kept[i] ? fingerprints.add(bytes.narrow(0, first.value, count.value)) : fingerprints.skip();
  }
}

// By piece of all parameters that have values, in order: whether any rank that keeps something of
// it has it otherwise than rank 0. The same answer on every rank.
std::vector<bool> find_differences(engine::Engine& engine, c10::Device place, ThreadPool& threads,
                                   const std::vector<ModelParameter>& parameters) {
  comm::Collectives& collectives = engine.collectives();
  std::vector<bool> differs(first_pieces(parameters).back());
  if (collectives.world_size() == 1) return differs;
  std::string what;
  for (const ModelParameter& parameter : parameters) {
    what += fmt::format(
        "parameter {} is built as {}\n", parameter.name,
        has_own_values(parameter) ? c10::toString(parameter.variable.scalar_type()) : "empty");
  }
  engine::require_same_text(collectives, "model", what);
  engine::InitReport::Phase phase(engine.init_report(), "compare ranks", {});
  Fingerprints fingerprints(choose_method(collectives, parameters), kPiece, engine.device(),
                            threads);
  std::string looked;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!has_own_values(parameters[i])) continue;
    const at::Tensor values = parameters[i].variable.detach().contiguous();
    add_pieces(fingerprints, values, pieces_kept(engine, place, static_cast<int>(i), values),
               looked);
    if (!parameters[i].variable.is_contiguous()) fingerprints.flush();  // one copy at a time
  }
  const std::vector<std::string> all = collectives.all_gather_text(fingerprints.take() + looked);
  for (std::size_t i = 0; i < differs.size(); ++i) {
    const auto at = [&](std::size_t rank) {
      return std::string_view(all[rank]).substr(i * kFingerprintBytes, kFingerprintBytes);
    };
    for (std::size_t r = 1; r < all.size(); ++r) {
      const bool counts = all[r][differs.size() * kFingerprintBytes + i] == '1';
      differs[i] = differs[i] || (counts && at(r) != at(0));
    }
  }
  phase.end();
  return differs;
}

// `differs`: of the pieces of this parameter.
void take_in(ValueIntake& intake, int param, const at::Tensor& values,
             const std::vector<bool>& differs) {
  if (std::find(differs.begin(), differs.end(), true) == differs.end()) {
    intake.store(param, Numel(), values);
    return;
  }
  const at::Tensor flat = values.view({-1});
  const Numel most(kPiece / Bytes(static_cast<std::int64_t>(flat.element_size())));
  for (std::size_t i = 0; i < differs.size(); ++i) {
    const Numel begin = most * static_cast<std::int64_t>(i);
    const Numel count = std::min(most, Numel(flat.numel()) - begin);
    const at::Tensor piece = flat.narrow(0, begin.value, count.value);
    differs[i] ? intake.store_from_rank_0(param, begin, piece) : intake.store(param, begin, piece);
  }
}

void let_go(const ModelParameter& parameter) {
  at::Tensor variable = parameter.variable;
  variable.set_data(at::empty({0}, variable.options().requires_grad(false)));
}

// Puts all values that lie on the device on the host.
void move_to_host(c10::Device place, const std::vector<ModelParameter>& parameters) {
  for (const ModelParameter& parameter : parameters) {
    if (!has_own_values(parameter) || parameter.variable.device() != place) continue;
    at::Tensor variable = parameter.variable;
    variable.set_data(variable.detach().contiguous().to(at::kCPU));
  }
  release_cached_memory(place);
}

// Takes the values of the units in the order in which the engine's memory grows. `piecewise`: the
// parameters' memory goes back to the system meanwhile.
bool take_all(engine::Engine& engine, c10::Device place, ThreadPool& threads,
              const std::vector<ModelParameter>& parameters, const std::vector<bool>& differs,
              bool piecewise) {
  ValueIntake intake(engine, place, threads);
  take_over(engine, intake, parameters);
  const std::vector<std::size_t> first = first_pieces(parameters);
  Bytes total;
  for (const ModelParameter& parameter : parameters) {
    if (has_own_values(parameter)) total += Bytes(parameter.variable.nbytes());
  }
  engine::InitReport::Phase phase(engine.init_report(), "place values", total);
  Bytes freed;
  for (const engine::Unit& unit : engine.weights().units()) {
    for (const int param : unit.spec.params) {
      const auto i = static_cast<std::size_t>(param);
      if (!has_own_values(parameters[i])) continue;
      const at::Tensor& variable = parameters[i].variable;
      const Bytes bytes(variable.nbytes());
      take_in(intake, param, variable.detach().contiguous(),
              {differs.begin() + offset(first[i]), differs.begin() + offset(first[i + 1])});
      freed += bytes;
      let_go(parameters[i]);
      phase.moved(bytes);
    }
    if (!piecewise || freed < kReleasedAtOnce) continue;
    release_cached_memory(place);  // the engine takes its memory past torch
    freed = Bytes();
  }
  engine.device().compute_stream().synchronize();
  release_cached_memory(place);
  return intake.complete();
}

// Each rank keeps its own part on the host while the device changes hands.
void take_own_parts(engine::Engine& engine, c10::Device place,
                    const std::vector<ModelParameter>& parameters) {
  struct Part {
    int param;
    Numel begin;
    at::Tensor values;
  };
  std::vector<Part> parts;
  Bytes total;
  const auto own_part = [&](std::size_t i) {
    const auto [begin, end] = engine.weights().owned_range(static_cast<int>(i));
    return parameters[i].variable.detach().contiguous().view({-1}).narrow(0, begin.value,
                                                                          (end - begin).value);
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (has_own_values(parameters[i])) total += align_up(Bytes(own_part(i).nbytes()), Bytes(8));
  }
  const auto memory = engine.device().allocate_host(total, memory::Kind::kStaging);
  engine::InitReport::Phase out(engine.init_report(), "move out", total);
  std::byte* next = memory->bytes().data();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!has_own_values(parameters[i])) continue;
    const at::Tensor own = own_part(i);
    const at::Tensor there = tensor_over(next, own.numel(), own.scalar_type(), at::kCPU);
    there.copy_(own, /*non_blocking=*/true);
    parts.push_back(
        {static_cast<int>(i), engine.weights().owned_range(static_cast<int>(i)).first, there});
    next += align_up(Bytes(own.nbytes()), Bytes(8)).size();
  }
  engine.device().compute_stream().synchronize();
  out.moved(total);
  out.end();
  for (const ModelParameter& parameter : parameters) {
    if (has_own_values(parameter)) let_go(parameter);
  }
  release_cached_memory(place);
  engine::InitReport::Phase in(engine.init_report(), "move in", total);
  for (const Part& part : parts) {
    engine.weights().enqueue_store(part.param, part.begin, Numel(part.values.numel()),
                                   static_cast<const std::byte*>(part.values.const_data_ptr()),
                                   from_scalar_type(part.values.scalar_type()));
  }
  engine.device().compute_stream().synchronize();
  in.moved(total);
}

}  // namespace

bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier) {
  const at::NoGradGuard no_grad;
  ThreadPool threads(at::get_num_threads());
  const std::vector<bool> differs = find_differences(engine, place, threads, parameters);
  const bool equal = std::find(differs.begin(), differs.end(), true) == differs.end();
  const bool all_there = std::all_of(
      parameters.begin(), parameters.end(),
      [&](const ModelParameter& p) { return has_own_values(p) && p.variable.device() == place; });
  bool complete = true;
  if (tier == plan::InitTier::kDistributed && equal && all_there) {
    take_own_parts(engine, place, parameters);
    complete = false;
  } else {
    const bool leaves_first =
        tier == plan::InitTier::kHost || (tier == plan::InitTier::kDistributed && all_there);
    if (leaves_first) move_to_host(place, parameters);
    complete =
        take_all(engine, place, threads, parameters, differs, tier == plan::InitTier::kDeviceGrow);
  }
  double least[] = {complete ? 1.0 : 0.0};
  engine.collectives().all_reduce(least, comm::ReduceOp::kMin);
  return least[0] > 0.0;
}

}  // namespace strata::torch
