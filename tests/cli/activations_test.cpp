// Activations of decoders: the estimate beside what was measured on one H100 of 80 GB, the choices
// of the engine by free memory, and the longest rows that fit.
#include "strata/cli/activations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"
#include "strata/cli/named_model.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Activations known(const std::string& model) {
  return *read_model(model).activations;
}

ActivationSettings checkpointed() {
  ActivationSettings settings;
  settings.checkpointing = true;
  return settings;
}

// Everything stays where it is, as before the engine could choose.
ActivationSettings plain() {
  ActivationSettings settings = checkpointed();
  settings.loss = "plain";
  settings.inputs = "device";
  settings.mlp_piece = 0;
  return settings;
}

ActivationRoom room_of(double device, double host = 0) {
  ActivationRoom room{Bytes(static_cast<std::int64_t>(device * 1e9)), {}};
  if (host > 0) room.host = Bytes(static_cast<std::int64_t>(host * 1e9));
  return room;
}

double gigabytes(Bytes bytes) {
  return static_cast<double>(bytes.value) / 1e9;
}

// Qwen3-0.6B, checkpointed, in torch's pool. The engine's own memory lies outside of it.
TEST(ActivationEstimate, IsNearWhatWasMeasured) {
  const Activations model = known("Qwen3-0.6B");
  ActivationSettings settings = plain();
  EXPECT_NEAR(gigabytes(activation_bytes(model, settings, 16'384, {}).total()), 31.0, 1.55);
  settings.loss = "fused";
  EXPECT_NEAR(gigabytes(activation_bytes(model, settings, 65'536, {}).total()), 9.5, 0.475);
  EXPECT_NEAR(gigabytes(activation_bytes(model, settings, 131'072, {}).total()), 19.0, 0.95);
}

// On an H200 of 150 GB: rows so long that MLPs and norms are computed in pieces and inputs move to
// the host. The attention kernel of these runs, within 1,024 tokens, copied queries and keys.
TEST(ActivationEstimate, IsNearWhatWasMeasuredOfLongRows) {
  const Activations model = known("Qwen3-0.6B");
  const ActivationRoom room = room_of(0.95 * 150.1 - 10.8);
  for (const auto& [tokens, measured] :
       {std::pair(917'504, 59.3), std::pair(1'310'720, 84.6), std::pair(1'835'008, 118.2)}) {
    const ActivationBytes bytes = activation_bytes(model, checkpointed(), tokens, room);
    EXPECT_TRUE(bytes.fused);
    EXPECT_GT(bytes.mlp_piece, 0);
    const double copied = 2.0 * (model.queries + model.keys) * tokens / 1e9;
    EXPECT_NEAR(gigabytes(bytes.total()) + copied, measured, measured / 20);
  }
}

TEST(ActivationEstimate, SaysWhatTheBytesAre) {
  const Activations model = known("Qwen3-0.6B");
  const ActivationBytes bytes = activation_bytes(model, plain(), 1000, {});
  EXPECT_EQ(bytes.kept.value, 1000 * 2 * 28 * 1024);
  EXPECT_EQ(bytes.loss.value, 1000 * (12 * 151'936 + 2 * 2 * 1024 + 4 * 1024));
  EXPECT_EQ(bytes.mlp.value, 1000 * 6 * 3072 * 2);
  EXPECT_TRUE(bytes.in_loss());
  EXPECT_EQ(bytes.total(), bytes.kept + bytes.loss);
  ActivationSettings settings = plain();
  settings.loss = "fused";
  const ActivationBytes fused = activation_bytes(model, settings, 100'000, {});
  EXPECT_EQ(fused.loss.value, (512 << 20) + 4 * 1024 * 151'936 + 100'000LL * (8 + 2) * 1024);
  EXPECT_EQ(fused.total(), fused.kept + fused.mlp + fused.attention);
  settings.checkpointing = false;
  const ActivationBytes all = activation_bytes(model, settings, 1000, {});
  EXPECT_EQ(all.kept.value, 1000LL * 28 * (2 * 25'600 + 4 * 5120));
}

// Without a known size nothing is chosen; with one, by shares of what is free.
TEST(ActivationEstimate, ChoosesAsTheEngine) {
  const Activations model = known("Qwen3-0.6B");
  const auto at = [&](std::int64_t tokens, const ActivationRoom& room) {
    return activation_bytes(model, checkpointed(), tokens, room);
  };
  EXPECT_FALSE(at(1 << 20, {}).fused);
  EXPECT_EQ(at(1 << 20, {}).mlp_piece, 0);
  EXPECT_EQ(at(1 << 20, {}).host, Bytes());
  const ActivationRoom room = room_of(60);
  EXPECT_FALSE(at(16'000, room).fused) << "29.2 of 59.1";
  EXPECT_TRUE(at(16'384, room).fused);
  EXPECT_EQ(at(250'000, room).mlp_piece, 0) << "49 kB of a token";
  EXPECT_GT(at(320'000, room).mlp_piece, 0);
  EXPECT_LT(at(320'000, room).mlp, 1_GiB);
  EXPECT_EQ(at(250'000, room).host, Bytes()) << "57 kB of a token";
  const ActivationBytes hosted = at(320'000, room);
  EXPECT_LE(gigabytes(hosted.kept), 15.0);
  EXPECT_EQ((hosted.kept + hosted.host).value, 320'000LL * 2 * 28 * 1024);
  ActivationSettings settings = checkpointed();
  settings.inputs = "cpu";
  EXPECT_EQ(activation_bytes(model, settings, 1000, {}).kept.value, 1000 * 2 * 2 * 1024);
  settings.on_gpu = false;
  EXPECT_EQ(activation_bytes(model, settings, 1000, {}).host, Bytes());
  const ActivationBytes experts =
      activation_bytes(known("Mixtral-8x7B"), checkpointed(), 1 << 20, room);
  EXPECT_EQ(experts.mlp_piece, 0) << "experts are computed whole";
}

TEST(ActivationEstimate, RanksShareRows) {
  const Activations model = known("Qwen3-8B");
  ActivationSettings settings = plain();
  settings.sequence_parallel = 8;
  const ActivationBytes shared = activation_bytes(model, settings, 8000, {});
  const ActivationBytes whole = activation_bytes(model, plain(), 1000, {});
  EXPECT_EQ(shared.tokens, 1000);
  EXPECT_EQ(shared.kept, whole.kept);
  EXPECT_EQ(shared.loss, whole.loss);
  settings.mlp_piece = 10;
  settings.sequence_parallel = 1;
  const Bytes alone = activation_bytes(model, settings, 1000, {}).attention;
  settings.sequence_parallel = 8;
  EXPECT_EQ((activation_bytes(model, settings, 8000, {}).attention - alone).value,
            1000 * 2 * 2 * (4096 + 1024))
      << "what is exchanged twice";
}

TEST(LongestRows, EndWhereTheDeviceIsFull) {
  const Activations model = known("Qwen3-0.6B");
  ActivationSettings settings = plain();
  const LongestRows logits = longest_rows(model, settings, room_of(66));
  EXPECT_EQ(logits.seq, 34'816) << "1.88 MB of a token";
  EXPECT_EQ(report_longest(model, settings, room_of(66), 1)["first"], "loss");
  settings.loss = "fused";
  const LongestRows fused = longest_rows(model, settings, room_of(66));
  EXPECT_EQ(fused.seq, 453'632) << "145 kB of a token";
  EXPECT_FALSE(fused.host_first);
  EXPECT_LE(gigabytes(fused.bytes.total()), 66);
  settings.sequence_parallel = 8;
  EXPECT_NEAR(static_cast<double>(longest_rows(model, settings, room_of(66)).seq), 8 * 453'632.0,
              8192);
  settings.micro_batch = 8;
  EXPECT_NEAR(static_cast<double>(longest_rows(model, settings, room_of(66)).seq), 453'632.0, 2048);
  EXPECT_EQ(longest_rows(model, settings, room_of(-1)).seq, 0);
}

TEST(LongestRows, EndWhereTheHostIsFull) {
  const Activations model = known("Qwen3-0.6B");
  ActivationSettings settings = checkpointed();
  settings.inputs = "cpu";
  const LongestRows rows = longest_rows(model, settings, room_of(66, 20));
  EXPECT_TRUE(rows.host_first);
  EXPECT_EQ(rows.seq, 374'784) << "26 inputs of 2 kB of each token";
  const auto report = report_longest(model, settings, room_of(66, 20), 1);
  EXPECT_EQ(report["first"], "host");
  EXPECT_EQ(report["advice"]["setting"], "strata.activations.device \"device\"");
  EXPECT_GT(report["advice"]["seq"], rows.seq);
}

TEST(LongestRows, AreLengthenedByOneSetting) {
  const Activations model = known("Qwen3-8B");
  const auto advice = [&](const ActivationSettings& settings, int world) {
    const auto report = report_longest(model, settings, room_of(66), world);
    return report["advice"].is_null() ? "" : report["advice"]["setting"].get<std::string>();
  };
  EXPECT_EQ(advice(plain(), 1), "strata.loss \"fused\"");
  ActivationSettings settings = plain();
  settings.loss = "fused";
  EXPECT_EQ(advice(settings, 1), "strata.activations.device \"cpu\"");
  EXPECT_EQ(advice(settings, 12), "strata.sequence_parallel.size 4") << "12 ranks, 8 key heads";
  settings.checkpointing = false;
  EXPECT_THAT(advice(settings, 1), HasSubstr("gradient checkpointing"));
  settings = checkpointed();
  settings.inputs = "cpu";
  EXPECT_EQ(advice(settings, 1), "");
}

TEST(SharedHeads, RefusesWhatCannotBeDealt) {
  const Activations model = known("Qwen3-0.6B");
  for (const int ranks : {1, 2, 4, 8, 16}) require_heads(model, ranks);
  try {
    require_heads(model, 6);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("strata.sequence_parallel.size: 16 attention heads"),
                                    HasSubstr("to 6 ranks; write one of 1, 2, 4, 8, 16")));
  }
}

}  // namespace
}  // namespace strata::cli
