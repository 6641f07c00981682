#include "strata/engine/config/config_page.h"

#include <fmt/format.h>

#include <span>
#include <string_view>

#include "strata/base/error.h"
#include "strata/engine/config/key.h"

namespace strata::engine {
namespace {

constexpr std::string_view kIntroduction =
    R"(# Configuration

<!-- Written by the target strata_config_doc from src/strata/engine/config/keys_*.cpp. -->

Strata reads DeepSpeed's JSON configuration: a dict, the path of a JSON file, JSON text, or that
text in urlsafe base64. Comments (`//`, `#`, `/* */`), a trailing comma and Python's `Infinity`
are accepted; a key given twice is refused. Python also reads Hjson, as DeepSpeed does, where the
package `hjson` is installed.

Every key is one of:

- **honoured**: it has the effect that the table says;
- **hint**: accepted, without effect, for the reason given. The engine lists the hints of a
  configuration once at the start; where one asks for memory or output that you would miss, it warns;
- **refused**: accepted only at its default, or while it is off. The error says what to write instead.

`strata check ds.json` says it of every key of a file ([how](COMMAND_LINE.md#check)).

A key that is in no table is refused, and the error names the nearest known one. At the top level
this holds for a key that resembles a known one: by its spelling, or because it speaks of zero,
optim, sched, bf16, fp16 or strata. Any other is your own, and is listed with the hints. (So are
top-level keys with a dot in their name, which some frameworks write.)

`null` means *not given*, and so does `"auto"`, which frameworks replace. Some values have to be
chosen, since training would compute something else: an `"auto"` that nobody replaced is an error of
`initialize` in `gradient_clipping`, `communication_data_type`, `zero_optimization.stage` and the
sections `bf16`, `fp16`, `torch_autocast` and `data_types`, in `gradient_accumulation_steps` where no
other batch size gives it, and for the scheduler's type and the numbers of the optimizer and the
scheduler, unless you pass these yourself. A `null` in place of one of these numbers is an error where
the number has a default. A configuration for training whose `optimizer` has no `type` is one, too.

What belongs to a feature that Strata does not have is **off**, and accepted, by one rule: `null`,
`false`, 0 and what is empty; a size of 1 (`"tensor_parallel": {"autotp_size": 1}`); a section with
`"enabled": false` or `"disable": true`; a section whose values are all off. An empty one is listed
with the hints.

A number may be a text (`"3"`, `"0.01"`), and `1` and `0` are read as true and false. Sizes may be
written as `5e8`; fractions of an element are cut off. Bytes may be written as `"512MiB"` (KiB, MiB,
GiB, TiB; KB, MB, GB, TB).

`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size`:
any two give the third, a batch or micro-batch alone means accumulation 1, and what does not
come out even is refused.
)";

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

std::string row(const Key& key) {
  const bool section = key.kind == Kind::kSection || key.kind == Kind::kSwitch;
  std::string what(key.meaning);
  if (!key.note.empty()) what += fmt::format("; *{}*", key.note);
  return fmt::format(
      "| `{}` | {} | {} | {} | {} |\n", key.path, section ? "section" : cell(wanted(key)),
      section ? "" : fmt::format("`{}`", cell(key.fallback)), name_of(key.treatment), cell(what));
}

std::string table(std::string_view title, std::span<const Key> keys) {
  std::string text = fmt::format(
      "\n## {}\n\n| key | value | default | | meaning |\n|---|---|---|---|---|\n", title);
  for (const Key& key : keys) text += row(key);
  return text;
}

std::string aliases_table() {
  std::string text = "\n## Old spellings\n\n| old | today |\n|---|---|\n";
  for (const Alias& alias : config_aliases()) {
    text += fmt::format("| `{}` | `{}` |\n", alias.old_path, alias.path);
  }
  text +=
      "| `zero_optimization.cpu_offload` | `zero_optimization.offload_optimizer.device`: \"cpu\" "
      "|\n"
      "| `zero_optimization.cpu_offload_param` | `zero_optimization.offload_param.device`: \"cpu\" "
      "|\n"
      "| `zero_optimization.cpu_offload_use_pin_memory` | `pin_memory` of the two |\n"
      "| `zero_optimization`: true | `zero_optimization.stage`: 1 |\n";
  return text;
}

}  // namespace

std::string render_config_page() {
  std::string page(kIntroduction);
  page += table("Batch, gradients, optimizer, scheduler", training_keys());
  page += table("optimizer.params of Adam and AdamW", adam_keys());
  page +=
      "\nOther elementwise classes of torch.optim (SGD, Adagrad, Adadelta, Adamax, NAdam, RAdam, "
      "RMSprop, Rprop, ASGD), Lion, and Adam with `torch_adam`, get their parameters as they "
      "are.\n";
  page +=
      "\nSchedulers of torch.optim.lr_scheduler (ConstantLR, CosineAnnealingLR, "
      "CosineAnnealingWarmRestarts, CyclicLR, ExponentialLR, LinearLR, MultiStepLR, OneCycleLR, "
      "PolynomialLR, StepLR) do so, too.\n";
  for (const std::string_view type : scheduler_types()) {
    page += table(fmt::format("scheduler.params of {}", type), scheduler_keys(type));
  }
  page += table("Sharding", zero_keys());
  page += table("Precision", precision_keys());
  page += table("Strata's own section", strata_keys());
  page += table("Offload", offload_keys());
  page += table("Checkpoints and diagnostics", diagnostics_keys());
  page += table("Features that are not offered", feature_keys());
  page += aliases_table();
  return page;
}

}  // namespace strata::engine
