#include "strata/cli/activations.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kGranule = 1024;   // tokens
constexpr std::int64_t kPiece = 8192;     // tokens, where the engine chooses
constexpr double kLossOfLogit = 12;       // bytes: two of the model's dtype and two in fp32
constexpr double kLossBlock = 512 << 20;  // logits of a block of tokens, which become gradients
constexpr double kMlpTensors = 8;         // as wide as the MLP, in its forward and backward
constexpr double kNormsShare = 32;        // of free memory, that a norm in one piece may take
constexpr double kInputsInUse = 2;        // of layers: the one in backward, and the next

Bytes rounded(double bytes) {
  return Bytes(static_cast<std::int64_t>(bytes));
}

double number(std::int64_t value) {
  return static_cast<double>(value);
}

// In pieces a norm keeps its input in place of what it makes of it, and nothing in fp32.
double bytes_kept(const Activations::Values& values, const ActivationBytes& found, double element) {
  return found.norm_pieces ? values.computed * element : values.bytes(element);
}

// The widest moment of one layer's backward. That of the MLP comes before that of attention, whose
// queries, keys, values and output have gradients as large, and where ranks share rows a copy of
// each that is exchanged. The values of the norm between them are gone by then.
void add_layer(const Activations& model, const ActivationSettings& settings,
               ActivationBytes& found) {
  const double tokens = number(found.tokens);
  const double element = number(size_of(settings.dtype).value);
  const std::int64_t sp = settings.sequence_parallel;
  const double repeated = number(std::max<std::int64_t>(1, sp / model.key_heads));
  double exchanged = 2 * (model.queries + model.keys * repeated) * element * (sp > 1 ? 2 : 1);
  if (settings.on_gpu) {
    // A flash kernel adds up the queries' gradients in fp32. Where heads share keys, it writes
    // those of keys and values for each head, and adds them up afterwards.
    exchanged += 4 * model.queries;
    if (model.key_heads < model.heads) exchanged += 2 * model.queries * element;
  }
  exchanged = (exchanged - bytes_kept(model.norm, found, element)) * tokens;
  double attention = 2 * model.hidden * element * tokens;  // the gradients of a block's two sums
  double mlp = 2 * model.mlp_width * element * tokens;     // gradients
  if (settings.checkpointing) {
    attention += bytes_kept(model.attention, found, element) * tokens;
    if (found.norm_pieces) attention -= model.hidden * element * tokens;  // a checkpoint's input
    mlp += model.mlp.bytes(element) * tokens;
  }
  if (found.mlp_piece > 0) mlp = kMlpTensors * model.mlp_width * element * number(found.mlp_piece);
  found.mlp = rounded(mlp > exchanged ? mlp : 0);
  found.attention = rounded(attention + (mlp > exchanged ? 0 : exchanged));
}

bool shares_heads(const Activations& model, std::int64_t ranks) {
  return model.heads % ranks == 0 && (model.key_heads % ranks == 0 || ranks % model.key_heads == 0);
}

bool exceeds(Bytes bytes, const std::optional<Bytes>& room) {
  return room && bytes > *room;
}

Json json_of(const LongestRows& rows) {
  const ActivationBytes& bytes = rows.bytes;
  const char* first = bytes.mlp > bytes.attention ? "mlp" : "attention";
  if (bytes.in_loss()) first = "loss";
  if (bytes.kept > (bytes.in_loss() ? bytes.loss : std::max(bytes.mlp, bytes.attention)))
    first = "kept";
  if (rows.seq == 0) first = "engine";
  Json json = json_of(bytes);
  json.update({{"seq", rows.seq}, {"first", rows.host_first ? "host" : first}});
  return json;
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
  const std::int64_t sp = settings.sequence_parallel;
  ActivationBytes found;
  found.tokens = (seq * settings.micro_batch + sp - 1) / sp;
  found.checkpointing = settings.checkpointing;
  const double tokens = number(found.tokens);
  const double element = number(size_of(settings.dtype).value);
  const double free = settings.on_gpu && room.device ? std::max(0.0, number(room.device->value))
                                                     : std::numeric_limits<double>::infinity();
  const bool large = kMlpTensors * model.mlp_width * element * tokens > free / 4;
  found.mlp_piece = settings.mlp_piece.value_or(large ? kPiece : 0);
  if (model.whole_mlp || found.mlp_piece >= found.tokens) found.mlp_piece = 0;
  const bool large_norm = model.hidden * (4 + element) * tokens > free / kNormsShare;
  found.norm_pieces = model.norm.in_fp32 > 0 && settings.mlp_piece.value_or(1) != 0 &&
                      (settings.mlp_piece || large_norm);
  double of_layer = model.hidden * element * tokens;
  double layers = model.layers;
  if (!settings.checkpointing) {
    of_layer = bytes_kept(model.attention, found, element) * tokens;
    if (found.mlp_piece == 0) of_layer += model.mlp.bytes(element) * tokens;
  } else if (settings.on_gpu && settings.inputs != "device") {
    const bool all = settings.inputs != "cpu" && layers * of_layer <= free / 4;
    if (!all) layers = std::min(layers, kInputsInUse);
  }
  found.kept = rounded(layers * of_layer);
  found.host = rounded((model.layers - layers) * of_layer);
  const double logits = kLossOfLogit * model.vocabulary * tokens;
  found.fused = settings.loss == "fused" ||
                (settings.loss == "auto" && logits > (free - number(found.kept.value)) / 2);
  // The gradient of the head's weight is summed in fp32. Backward has both gradients twice: as
  // forward left them, and multiplied by that of the loss.
  const double weight = model.hidden * model.vocabulary;
  const double inputs = element * model.hidden * tokens;
  const double blocks = inputs + 4 * weight + std::max(kLossBlock, inputs + element * weight);
  found.loss = rounded(bytes_kept(model.norm, found, element) * tokens +
                       (found.fused ? std::min(logits, blocks) : logits));
  add_layer(model, settings, found);
  return found;
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
  LongestRows longest = longest_rows(model, settings, room);
  Json report = json_of(longest);
  Json& advice = report["advice"];
  const auto attempt = [&](const std::string& name, const ActivationSettings& other) {
    const LongestRows rows = longest_rows(model, other, room);
    if (rows.seq <= longest.seq) return;
    longest = rows;
    advice = json_of(rows);
    advice["setting"] = name;
  };
  std::vector<ActivationSettings> others(5, settings);
  others[0].checkpointing = true;
  attempt("gradient checkpointing in the script (here --checkpointing)", others[0]);
  others[1].inputs = "cpu";
  attempt("strata.activations.device \"cpu\"", others[1]);
  others[2].inputs = "device";
  attempt("strata.activations.device \"device\"", others[2]);
  others[3].loss = "fused";
  attempt("strata.loss \"fused\"", others[3]);
  others[4].mlp_piece = kPiece;
  attempt(fmt::format("strata.mlp_piece {}", kPiece), others[4]);
  ActivationSettings shared = settings;
  for (std::int64_t& ranks = shared.sequence_parallel = 2;
       ranks <= std::min<std::int64_t>(world_size, model.heads); ++ranks) {
    if (world_size % ranks == 0 && shares_heads(model, ranks))
      attempt(fmt::format("strata.sequence_parallel.size {}", ranks), shared);
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
