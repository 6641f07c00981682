#include "engine/config/config_page.h"

#include <fmt/core.h>

#include <array>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/error.h"
#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

constexpr std::string_view kIntroduction =
    R"(# Configuration

<!-- Written by the target strata_config_doc from src/strata/engine/config/keys_*.cpp. -->

Strata reads DeepSpeed's JSON configuration. [The first table](#the-thirty-keys-that-people-use-first)
has the thirty keys that most scripts need; the reference after it has all keys.
`strata check ds.json` explains every key of a file ([how](COMMAND_LINE.md#check)).

```json
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
}
```
)";

constexpr std::string_view kTextOfRules = R"(
## How a configuration is read

**Forms.** A configuration is a dict, the path of a JSON file, JSON text, or this text in urlsafe
base64. Comments (`//`, `#`, `/* */`), a trailing comma and Python's `Infinity` are accepted. A key
given twice is refused. Python also reads Hjson where the package `hjson` is installed.

**Treatment.** Each key is one of:

- **honoured**: it has the effect that the table describes;
- **hint**: accepted without effect, for the given reason. The engine lists hints once at the start,
  and warns of a hint that asks for memory or output;
- **refused**: accepted only at its default, or while it is off. The error names a replacement.

**Unknown keys.** A key in no table is refused, and the error names the nearest known key. Top-level
keys are an exception: the engine refuses only those that resemble a known key in spelling, or that
contain zero, optim, sched, bf16, fp16 or strata. It lists all others with the hints as your own.
Top-level keys with a dot, which some frameworks write, are your own, too.

**`null` and `"auto"`** mean *not given*; frameworks replace `"auto"`. `initialize` raises an error
where an `"auto"` is left and the value changes the training: in `gradient_clipping`,
`communication_data_type`, `zero_optimization.stage`, the sections `bf16`, `fp16`, `torch_autocast`
and `data_types`; in `gradient_accumulation_steps` if no other batch size determines it; and in the
scheduler's type and the numbers of optimizer and scheduler, unless the script passes these objects.
`null` for one of these numbers is an error if the number has a default. An `optimizer` without a
`type` is an error in a configuration for training.

**Features that Strata does not have** are accepted while they are **off**: `null`, `false`, 0 or
empty; a size of 1 (`"tensor_parallel": {"autotp_size": 1}`); a section with `"enabled": false` or
`"disable": true`; a section whose values are all off. The engine lists an empty section with the
hints.

**Numbers** may be texts (`"3"`, `"0.01"`); `1` and `0` are read as true and false. Sizes may be
written as `5e8`; fractions of an element are cut off. Bytes may be written as `"512MiB"` (KiB, MiB,
GiB, TiB; KB, MB, GB, TB).

**Batch sizes**: `train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
world size`. Two of them determine the third. A batch or micro-batch alone means accumulation 1. A
division with a remainder is refused.
)";

// The keys of the first table, in its order.
constexpr auto kFirst = std::to_array<std::string_view>({
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "steps_per_print",
    "optimizer.type",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.weight_decay",
    "scheduler.type",
    "scheduler.params",
    "bf16.enabled",
    "fp16.enabled",
    "fp16.loss_scale",
    "zero_optimization.stage",
    "zero_optimization.overlap_comm",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "strata.placement",
    "strata.max_live_bytes",
    "strata.collectives",
    "checkpoint.async",
    "wall_clock_breakdown",
});
static_assert(kFirst.size() == 30);

std::string_view name_of(Treatment treatment) {
  switch (treatment) {
    case Treatment::kHonoured:
    case Treatment::kShown:
      return "honoured";
    case Treatment::kHint:
      return "hint";
    case Treatment::kMissed:
      return "hint, warned of";
    case Treatment::kRefused:
      return "refused";
  }
  STRATA_ASSERT(false);
}

// A '|' would end the cell.
std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

std::string meaning_of(const Key& key) {
  return key.note.empty() ? std::string(key.meaning)
                          : fmt::format("{}; *{}*", key.meaning, key.note);
}

std::string row(const Key& key) {
  const bool section = key.kind == Kind::kSection || key.kind == Kind::kSwitch;
  return fmt::format("| `{}` | {} | {} | {} | {} |\n", key.path,
                     section ? "section" : cell(wanted(key)),
                     section ? "" : fmt::format("`{}`", cell(key.fallback)), name_of(key.treatment),
                     cell(meaning_of(key)));
}

std::string table(std::string_view title) {
  std::string text = fmt::format(
      "\n## {}\n\n| key | value | default | | meaning |\n|---|---|---|---|---|\n", title);
  for (const Key& key : keys_of(title)) text += row(key);
  return text;
}

std::string first_table() {
  std::string text =
      "\n## The thirty keys that people use first\n\n| key | value | default | meaning "
      "|\n|---|---|---|---|\n";
  for (const std::string_view path : kFirst) {
    const Key* key = find_key(config_keys(), path);
    if (key == nullptr) key = find_key(adam_keys(), path);
    STRATA_ASSERT(key != nullptr && has_effect(key->treatment));
    text += fmt::format("| `{}` | {} | `{}` | {} |\n", path, cell(wanted(*key)),
                        cell(key->fallback), cell(meaning_of(*key)));
  }
  return text;
}

std::string aliases_table() {
  std::string text = "\n## Old spellings\n\n| old | today |\n|---|---|\n";
  for (const Alias& alias : config_aliases()) {
    text += fmt::format("| `{}` | `{}` |\n", alias.old_path, alias.path);
  }
  text +=
      "| `zero_optimization.cpu_offload` | `zero_optimization.offload_optimizer.device`: \"cpu\" "
      "|\n| `zero_optimization.cpu_offload_param` | `zero_optimization.offload_param.device`: "
      "\"cpu\" |\n| `zero_optimization.cpu_offload_use_pin_memory` | `pin_memory` of the two |\n| "
      "`zero_optimization`: true | `zero_optimization.stage`: 1 |\n";
  return text;
}

}  // namespace

std::string render_config_page() {
  std::string page(kIntroduction);
  page += first_table();
  page += kTextOfRules;
  page += table("Batch, gradients, optimizer, scheduler");
  page += table("optimizer.params of Adam and AdamW");
  page +=
      "\nOther elementwise classes of torch.optim (SGD, Adagrad, Adadelta, Adamax, NAdam, RAdam, "
      "RMSprop, Rprop, ASGD), Lion, and Adam with `torch_adam`, get these parameters unchanged.\n";
  page +=
      "\nSchedulers of torch.optim.lr_scheduler (ConstantLR, CosineAnnealingLR, "
      "CosineAnnealingWarmRestarts, CyclicLR, ExponentialLR, LinearLR, MultiStepLR, OneCycleLR, "
      "PolynomialLR, StepLR) also get theirs unchanged.\n";
  for (const std::string_view type : kSchedulerTypes)
    page += table(fmt::format("scheduler.params of {}", type));
  page += table("Sharding");
  page += table("Precision");
  page += table("Strata's own section");
  page += table("Offload");
  page += table("Checkpoints and diagnostics");
  page += table("Features that are not offered");
  page += aliases_table();
  return page;
}

}  // namespace strata::engine
