#include "strata/engine/config/key.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <vector>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// cpu_offload and its kin change more than a name; see aliases.cpp.
constexpr std::array kAliases{
    Alias{"bfloat16", "bf16"},
    Alias{"zero_optimization.aio", "aio"},  // before what is old in aio
    Alias{"zero_optimization.stage3_gather_fp16_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    Alias{"zero_optimization.gather_16bit_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    Alias{"zero_optimization.prefetch_bucket_size",
          "zero_optimization.stage3_prefetch_bucket_size"},
    Alias{"zero_optimization.module_granularity_threshold",
          "zero_optimization.stage3_module_granularity_threshold"},
    Alias{"zero_optimization.use_all_reduce_for_fetch_params",
          "zero_optimization.stage3_use_all_reduce_for_fetch_params"},
    Alias{"zero_optimization.allgather_sequential",
          "zero_optimization.stage3_allgather_sequential"},
    Alias{"zero_optimization.stage3_allgather_single_param",
          "zero_optimization.stage3_allgather_sequential"},
    Alias{"zero_optimization.param_persistence_threshold",
          "zero_optimization.stage3_param_persistence_threshold"},
    Alias{"zero_optimization.model_persistence_threshold",
          "zero_optimization.stage3_model_persistence_threshold"},
    Alias{"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"},
    Alias{"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"},
    Alias{"aio.thread_count", "aio.intra_op_parallelism"},
};

std::vector<Key> join_tables() {
  std::vector<Key> all;
  for (const auto& part : {training_keys(), zero_keys(), offload_keys(), precision_keys(),
                           diagnostics_keys(), feature_keys(), strata_keys()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::string spelled_choices(std::string_view limits) {
  std::string text;
  for (const char c : limits) {
    if (c == '|') {
      text += ", ";
    } else {
      text += c;
    }
  }
  return text;
}

std::string with_limits(std::string_view what, std::string_view limits) {
  return limits.empty() ? std::string(what) : fmt::format("{} {}", what, limits);
}

}  // namespace

std::span<const Key> config_keys() {
  static const std::vector<Key> kAll = join_tables();
  return kAll;
}

std::span<const Alias> config_aliases() {
  return kAliases;
}

const Key* find_key(std::span<const Key> keys, std::string_view path) {
  const auto found = std::ranges::find(keys, path, &Key::path);
  return found == keys.end() ? nullptr : &*found;
}

std::string_view leaf_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view parent_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : path.substr(0, dot);
}

std::string join_path(std::string_view parent, std::string_view leaf) {
  return parent.empty() ? std::string(leaf) : fmt::format("{}.{}", parent, leaf);
}

std::string wanted(const Key& key) {
  switch (key.kind) {
    case Kind::kFlag:
      return "true or false";
    case Kind::kInteger:
      return with_limits("an integer", key.limits);
    case Kind::kNumel:
      return with_limits("a number of elements", key.limits);
    case Kind::kBytes:
      return with_limits("bytes as a number or text like \"512MiB\",", key.limits);
    case Kind::kNumber:
      return with_limits("a number", key.limits);
    case Kind::kCount:
      return with_limits("a number or Infinity,", key.limits);
    case Kind::kText:
      return "a text";
    case Kind::kChoice:
      return "one of " + spelled_choices(key.limits);
    case Kind::kWord:
      return fmt::format("one of {} (in any case)", spelled_choices(key.limits));
    case Kind::kStrings:
      return "a list of texts";
    case Kind::kTexts:
      return "a text or a list of texts";
    case Kind::kNumbers:
      return with_limits("a list of numbers,", key.limits);
    case Kind::kPerGroup:
      return with_limits("a number, or a list of one number a parameter group,", key.limits);
    case Kind::kRules:
      return "a list of objects [{ ... }], or \"auto\"";
    case Kind::kSection:
    case Kind::kParams:
    case Kind::kSwitch:
      return "an object { ... }";
  }
  STRATA_ASSERT(false);
}

}  // namespace strata::engine
