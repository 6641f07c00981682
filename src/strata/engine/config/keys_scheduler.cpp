// Rows of scheduler.params, one table a scheduler.
#include <array>

#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

using enum Kind;
using enum Treatment;

#define PARAM "scheduler.params."
#define TYPE_ROW                                                                                 \
  Key {                                                                                          \
    PARAM "warmup_type", kChoice, "\"log\"", "log|linear", kHonoured, "shape of the warm-up", "" \
  }
#define STEPS_ROW                                                 \
  Key {                                                           \
    PARAM "warmup_num_steps", kInteger, "1000", "> 0", kHonoured, \
        "steps of the warm-up; fewer than 2 count as 2", ""       \
  }
#define LAST_ROW                                                      \
  Key {                                                               \
    PARAM "last_batch_iteration", kInteger, "-1", ">= -1", kHonoured, \
        "step to start after; -1: from the beginning", ""             \
  }

constexpr std::array kWarmup{
    Key{PARAM "warmup_min_lr", kPerGroup, "0.0", ">= 0", kHonoured, "rate at the start", ""},
    Key{PARAM "warmup_max_lr", kPerGroup, "null", ">= 0", kHonoured,
        "rate after the warm-up; null: the optimizer's", ""},
    STEPS_ROW, TYPE_ROW, LAST_ROW};

constexpr std::array kDecay{
    Key{PARAM "total_num_steps", kInteger, "null", ">= 0", kHonoured,
        "steps of the whole training; required", ""},
    Key{PARAM "warmup_min_lr", kPerGroup, "0.0", ">= 0", kHonoured, "rate at the start", ""},
    Key{PARAM "warmup_max_lr", kPerGroup, "0.001", ">= 0", kHonoured, "rate after the warm-up", ""},
    STEPS_ROW,
    TYPE_ROW,
    LAST_ROW};

constexpr std::array kCosine{Key{PARAM "total_num_steps", kInteger, "null", ">= 0", kHonoured,
                                 "steps of the whole training; required", ""},
                             Key{PARAM "warmup_min_ratio", kNumber, "0.0", ">= 0", kHonoured,
                                 "share of the optimizer's rate at the start", ""},
                             STEPS_ROW,
                             Key{PARAM "cos_min_ratio", kNumber, "0.0001", ">= 0", kHonoured,
                                 "share of the optimizer's rate at the end", ""},
                             TYPE_ROW,
                             LAST_ROW};

constexpr std::array kOneCycle{
    Key{PARAM "cycle_min_lr", kPerGroup, "null", ">= 0", kHonoured, "lowest rate; required", ""},
    Key{PARAM "cycle_max_lr", kPerGroup, "null", ">= 0", kHonoured, "highest rate; required", ""},
    Key{PARAM "decay_lr_rate", kNumber, "0.0", "", kHonoured, "decay after the cycle", ""},
    Key{PARAM "cycle_first_step_size", kNumber, "2000.0", "> 0", kHonoured, "steps of the rise",
        ""},
    Key{PARAM "cycle_second_step_size", kNumber, "null", ">= 0", kHonoured,
        "steps of the fall; null: as the rise", ""},
    Key{PARAM "cycle_first_stair_count", kInteger, "0", ">= 0", kHonoured,
        "stairs of the rise; 0: smooth", ""},
    Key{PARAM "cycle_second_stair_count", kInteger, "null", ">= 0", kHonoured,
        "stairs of the fall; null: as the rise", ""},
    Key{PARAM "decay_step_size", kNumber, "0.0", ">= 0", kHonoured,
        "steps of one decay; 0: no decay", ""},
    Key{PARAM "cycle_momentum", kFlag, "true", "", kHonoured,
        "cycle beta1 against the rate (beta2 becomes 0.99)", ""},
    Key{PARAM "cycle_min_mom", kPerGroup, "0.8", "", kHonoured, "lowest beta1", ""},
    Key{PARAM "cycle_max_mom", kPerGroup, "0.9", "", kHonoured, "highest beta1", ""},
    Key{PARAM "decay_mom_rate", kNumber, "0.0", "", kHonoured, "growth of beta1 after the cycle",
        ""},
    LAST_ROW};

constexpr std::array kRangeTest{
    Key{PARAM "lr_range_test_min_lr", kPerGroup, "0.001", ">= 0", kHonoured, "first rate", ""},
    Key{PARAM "lr_range_test_step_size", kInteger, "2000", "> 0", kHonoured,
        "steps of one interval", ""},
    Key{PARAM "lr_range_test_step_rate", kNumber, "1.0", "", kHonoured,
        "growth of one interval, in first rates", ""},
    Key{PARAM "lr_range_test_staircase", kFlag, "false", "", kHonoured,
        "grow at the end of an interval only", ""},
    LAST_ROW};

#undef PARAM
#undef TYPE_ROW
#undef STEPS_ROW
#undef LAST_ROW

constexpr std::array<std::string_view, 5> kTypes{"WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
                                                 "OneCycle", "LRRangeTest"};

}  // namespace

std::span<const std::string_view> scheduler_types() {
  return kTypes;
}

std::span<const Key> scheduler_keys(std::string_view type) {
  if (type == "WarmupLR") return kWarmup;
  if (type == "WarmupDecayLR") return kDecay;
  if (type == "WarmupCosineLR") return kCosine;
  if (type == "OneCycle") return kOneCycle;
  if (type == "LRRangeTest") return kRangeTest;
  return {};
}

}  // namespace strata::engine
