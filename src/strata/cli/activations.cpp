#include "strata/cli/activations.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kGranule = 1024;  // tokens
constexpr std::int64_t kSeqMax = 100'000'000;
constexpr double kLossOfLogit = 12;       // bytes: two of the model's dtype and two in fp32
constexpr double kLossBlock = 256 << 20;  // 128 MiB of fp32 logits, and their gradients
constexpr double kMlpTensors = 8;         // as wide as the MLP, in its forward and backward
constexpr double kMlpGradients = 2;       // of these, where the others were kept by forward
constexpr std::int64_t kPiece = 4096;     // tokens, where the engine chooses
constexpr double kLastInputs = 2;         // of layers on the device, if all others' are on the host

Bytes rounded(double bytes) {
  return Bytes(static_cast<std::int64_t>(bytes));
}

bool shares_heads(const Activations& model, std::int64_t ranks) {
  return model.heads % ranks == 0 && (model.key_heads % ranks == 0 || ranks % model.key_heads == 0);
}

// One estimate.
class Estimate {
 public:
  Estimate(const Activations& model, const ActivationSettings& settings, std::int64_t seq,
           const ActivationRoom& room)
      : model_(model),
        settings_(settings),
        element_(static_cast<double>(size_of(settings.dtype).value)),
        tokens_(static_cast<double>(settings.tokens_of_rank(seq))) {
    if (settings.on_gpu && room.device)
      free_ = std::max(0.0, static_cast<double>(room.device->value));
    found_.tokens = settings.tokens_of_rank(seq);
    found_.checkpointing = settings.checkpointing;
  }

  ActivationBytes run() {
    choose_piece();
    add_kept();
    add_loss();
    add_layer();
    return found_;
  }

 private:
  double computed(double values) const { return values * element_ * tokens_; }

  void choose_piece() {
    const double all = kMlpTensors * computed(model_.mlp_width);
    std::int64_t piece = settings_.mlp_piece.value_or(free_ && all > *free_ / 4 ? kPiece : 0);
    if (model_.experts || static_cast<double>(piece) >= tokens_) piece = 0;
    found_.mlp_piece = piece;
  }

  void add_kept() {
    if (!settings_.checkpointing) {
      const double of_block = model_.attention.bytes(element_) +
                              (found_.mlp_piece > 0 ? 0 : model_.mlp.bytes(element_));
      found_.kept = rounded(model_.layers * of_block * tokens_);
      return;
    }
    const double input = computed(model_.hidden);
    double layers = model_.layers;
    if (settings_.inputs == "cpu" && settings_.on_gpu) layers = kLastInputs;
    if (settings_.inputs == "auto" && free_) layers = std::max(kLastInputs, *free_ / 4 / input);
    layers = std::floor(std::min(layers, model_.layers));
    found_.kept = rounded(layers * input);
    found_.host = rounded((model_.layers - layers) * input);
  }

  void add_loss() {
    const double logits = kLossOfLogit * model_.vocabulary * tokens_;
    found_.fused = settings_.loss == "fused";
    if (settings_.loss == "auto" && free_)
      found_.fused = logits > (*free_ - static_cast<double>(found_.kept.value)) / 2;
    const double norm = model_.norm.bytes(element_) * tokens_;
    // Without logits the gradient of the head's input is summed in fp32, beside two copies.
    const double inputs = computed(2 * model_.hidden) + 4 * model_.hidden * tokens_;
    found_.loss = rounded(norm + (found_.fused ? std::min(logits, kLossBlock + inputs) : logits));
  }

  // Backward of the MLP comes before that of attention, whose queries, keys, values and output have
  // gradients as large, and where ranks share rows a copy of each that is exchanged. The values of
  // the norm between them are gone by then.
  void add_layer() {
    const auto sp = settings_.sequence_parallel;
    const double repeated = static_cast<double>(std::max<std::int64_t>(1, sp / model_.key_heads));
    const double exchanged =
        computed(2 * model_.queries + 2 * model_.keys * repeated) * (sp > 1 ? 2 : 1) -
        model_.norm.bytes(element_) * tokens_;
    double mlp = kMlpGradients * computed(model_.mlp_width);
    if (settings_.checkpointing) mlp += model_.mlp.bytes(element_) * tokens_;
    if (found_.mlp_piece > 0)
      mlp = kMlpTensors * model_.mlp_width * element_ * static_cast<double>(found_.mlp_piece);
    double attention = computed(2 * model_.hidden);  // the gradients of a block's two sums
    if (settings_.checkpointing) attention += model_.attention.bytes(element_) * tokens_;
    found_.mlp = rounded(mlp > exchanged ? mlp : 0);
    found_.attention = rounded(attention + (mlp > exchanged ? 0 : exchanged));
  }

  const Activations& model_;
  const ActivationSettings& settings_;
  double element_;
  double tokens_;
  std::optional<double> free_;
  ActivationBytes found_;
};

Json json_of(const LongestRows& rows) {
  const ActivationBytes& bytes = rows.bytes;
  Json json = json_of(bytes);
  json["seq"] = rows.seq;
  const char* first = bytes.mlp > bytes.attention ? "mlp" : "attention";
  Bytes largest = std::max(bytes.mlp, bytes.attention);
  if (bytes.in_loss()) {
    first = "loss";
    largest = bytes.loss;
  }
  json["first"] = rows.host_first ? "host" : bytes.kept > largest ? "kept" : first;
  return json;
}

bool exceeds(Bytes bytes, const std::optional<Bytes>& room) {
  return room && bytes > *room;
}

}  // namespace

ActivationSettings::ActivationSettings(const engine::Config& config, DType model_dtype)
    : dtype(config.precision.weight_dtype(model_dtype)),
      micro_batch(config.batch.micro_batch_size.value_or(1)),
      sequence_parallel(config.sequence_parallel),
      loss(config.strata.loss),
      inputs(config.strata.activations),
      mlp_piece(config.strata.mlp_piece) {}

Json json_of(const ActivationBytes& bytes) {
  return {{"estimate", true},
          {"tokens", bytes.tokens},
          {"checkpointing", bytes.checkpointing},
          {"bytes", bytes.total().value},
          {"of_token", bytes.total().value / bytes.tokens},
          {"kept", bytes.kept.value},
          {"host", bytes.host.value},
          {"loss", bytes.loss.value},
          {"mlp", bytes.mlp.value},
          {"attention", bytes.attention.value},
          {"fused", bytes.fused},
          {"mlp_piece", bytes.mlp_piece},
          {"peak", bytes.in_loss() ? "loss" : "layer"}};
}

ActivationBytes activation_bytes(const Activations& model, const ActivationSettings& settings,
                                 std::int64_t seq, const ActivationRoom& room) {
  return Estimate(model, settings, seq, room).run();
}

LongestRows longest_rows(const Activations& model, const ActivationSettings& settings,
                         const ActivationRoom& room) {
  const std::int64_t granule = std::lcm(kGranule, settings.sequence_parallel);
  const auto bytes_of = [&](std::int64_t count) {
    return activation_bytes(model, settings, count * granule, room);
  };
  std::int64_t fits = 0;
  std::int64_t beyond = kSeqMax / granule + 1;
  while (beyond - fits > 1) {
    const std::int64_t middle = fits + (beyond - fits) / 2;
    const ActivationBytes bytes = bytes_of(middle);
    const bool lacks = exceeds(bytes.total(), room.device) || exceeds(bytes.host, room.host);
    (lacks ? beyond : fits) = middle;
  }
  return {fits * granule, bytes_of(std::max<std::int64_t>(fits, 1)),
          !exceeds(bytes_of(beyond).total(), room.device)};
}

Json report_longest(const Activations& model, const ActivationSettings& settings,
                    const ActivationRoom& room, int world_size) {
  const LongestRows own = longest_rows(model, settings, room);
  Json report = json_of(own);
  Json& advice = report["advice"];
  std::int64_t longest = own.seq;
  const auto attempt = [&](const std::string& name, const auto& change) {
    ActivationSettings other = settings;
    change(other);
    const LongestRows rows = longest_rows(model, other, room);
    if (rows.seq <= longest) return;
    longest = rows.seq;
    advice = json_of(rows);
    advice["setting"] = name;
  };
  attempt("gradient checkpointing in the script (here --checkpointing)",
          [](ActivationSettings& other) { other.checkpointing = true; });
  for (const char* const place : {"cpu", "device"})
    attempt(fmt::format("strata.activations.device \"{}\"", place),
            [&](ActivationSettings& other) { other.inputs = place; });
  attempt("strata.loss \"fused\"", [](ActivationSettings& other) { other.loss = "fused"; });
  attempt(fmt::format("strata.mlp_piece {}", kPiece),
          [](ActivationSettings& other) { other.mlp_piece = kPiece; });
  for (int ranks = 2; ranks <= std::min<std::int64_t>(world_size, model.heads); ++ranks) {
    if (world_size % ranks == 0 && shares_heads(model, ranks))
      attempt(fmt::format("strata.sequence_parallel.size {}", ranks),
              [&](ActivationSettings& other) { other.sequence_parallel = ranks; });
  }
  return report;
}

void require_heads(const Activations& model, std::int64_t sequence_parallel) {
  if (shares_heads(model, sequence_parallel)) return;
  std::vector<std::int64_t> possible;
  for (std::int64_t ranks = 1; ranks <= model.heads; ++ranks)
    if (shares_heads(model, ranks)) possible.push_back(ranks);
  throw UsageError(
      "strata.sequence_parallel.size: {} attention heads and {} key heads cannot be dealt to {} "
      "ranks; write one of {}",
      model.heads, model.key_heads, sequence_parallel, fmt::join(possible, ", "));
}

}  // namespace strata::cli
