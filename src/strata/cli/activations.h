// An estimate of what one rank holds beside the engine while a decoder runs forward and backward,
// and the longest rows that fit. It follows what the engine does by its configuration: the loss
// from all logits or without them, an MLP in pieces, inputs of checkpoints on the host, rows that
// ranks share. It assumes no dropout, and an attention kernel that keeps no scores (SDPA, flash).
// Values and pure functions; safe everywhere. Errors: UsageError of require_heads().
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "strata/base/dtype.h"
#include "strata/base/units.h"

namespace strata::engine {
struct Config;
}

namespace strata::cli {

// Values that a decoder keeps of one token.
struct Activations {
  struct Values {
    double computed = 0;  // in the dtype that the model computes in
    double in_fp32 = 0;

    double bytes(double element) const { return computed * element + in_fp32 * 4; }
  };
  double layers = 0;
  double hidden = 0;
  double queries = 0;  // width of all
  double keys = 0;     // of all; as wide as that of values
  std::int64_t heads = 1;
  std::int64_t key_heads = 1;
  double mlp_width = 0;    // of all chosen experts
  bool whole_mlp = false;  // it is never computed in pieces: experts, and GPT-2's
  double vocabulary = 0;
  Values attention;  // that a block keeps until backward, its norms included
  Values mlp;        // likewise
  Values norm;       // the last one, with the input of the head; RMS norms keep values in fp32
};

constexpr std::int64_t kSeqMax = 100'000'000;  // tokens of a row

struct ActivationSettings {
  ActivationSettings() = default;
  ActivationSettings(const engine::Config& config, DType model_dtype);

  DType dtype = DType::kBFloat16;
  bool on_gpu = true;
  bool checkpointing = false;  // inputs of blocks are kept, and one block at a time runs again
  std::int64_t micro_batch = 1;
  std::int64_t sequence_parallel = 1;
  std::string loss = "auto";    // of strata.loss
  std::string inputs = "auto";  // of strata.activations.device
  std::optional<std::int64_t> mlp_piece;
};

// One rank's peaks. The loss and one layer's backward are at different times.
struct ActivationBytes {
  std::int64_t tokens = 0;
  bool checkpointing = false;
  Bytes kept;       // inputs of checkpoints, or all that blocks keep
  Bytes host;       // inputs of checkpoints there
  Bytes loss;       // logits and what the loss makes of them
  Bytes mlp;        // of one layer, which is in backward
  Bytes attention;  // of this layer, and all but its MLP
  bool fused = false;
  std::int64_t mlp_piece = 0;  // tokens; 0: all
  bool norm_pieces = false;    // norms keep their inputs alone

  bool in_loss() const { return loss > mlp + attention; }  // is the peak
  Bytes total() const { return kept + (in_loss() ? loss : mlp + attention); }
};
// The fields by their names, "bytes": the total, "of_token", "peak": "loss" or "layer".
nlohmann::json json_of(const ActivationBytes& bytes);

// Memory of a rank beside the engine's. Absent: without a bound, and the engine's own choices are
// those of a device with plenty.
struct ActivationRoom {
  std::optional<Bytes> device;
  std::optional<Bytes> host;
};

// For rows of `seq` tokens.
ActivationBytes activation_bytes(const Activations& model, const ActivationSettings& settings,
                                 std::int64_t seq, const ActivationRoom& room);

struct LongestRows {
  std::int64_t seq = 0;     // a multiple of 1,024 and of the ranks that share rows; 0: none fits
  ActivationBytes bytes;    // of it, or of the shortest
  bool host_first = false;  // the host's memory runs out, and not the device's
};
LongestRows longest_rows(const Activations& model, const ActivationSettings& settings,
                         const ActivationRoom& room);

// The same with its bytes as JSON; "first": "host", or the largest part of the device's peak, or
// "engine" where none fits;
// "advice": the longest rows with the one "setting" that makes them longest, null where none does.
// `world_size`: ranks that may share rows.
nlohmann::json report_longest(const Activations& model, const ActivationSettings& settings,
                              const ActivationRoom& room, int world_size);

// Refuses a number of ranks that cannot share the heads of attention.
void require_heads(const Activations& model, std::int64_t sequence_parallel);

}  // namespace strata::cli
