// Trains a small transformer to say a sequence backwards, sharded over ranks, without Python.
//
//   RANK=r WORLD_SIZE=n MASTER_ADDR=127.0.0.1 MASTER_PORT=p train_reversal CONFIG [STEPS [FOLDER]]
//
// Rank 0 prints the loss of every step. With FOLDER the weights are saved there, a model without an
// engine loads them, and the losses of both are compared. Exits with 1 if the loss did not fall to
// half, or if the saved weights differ from the trained ones.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "reversal_model.h"
#include "strata/torch/rank_environment.h"
#include "strata/torch/trainer.h"

namespace {

constexpr int64_t kSymbols = 16;
constexpr int64_t kSeparator = kSymbols;
constexpr int64_t kLength = 8;

struct Batch {
  torch::Tensor inputs;   // a b c | c b
  torch::Tensor targets;  // . . c   b a, where . counts for nothing
};

// Rank `rank`'s part of a micro-step's sequences, which are the same for any number of ranks.
Batch make_batch(int64_t micro_step, int64_t sequences_per_rank, int rank, int world_size) {
  torch::manual_seed(1000 + micro_step);
  const auto all = torch::randint(kSymbols, {sequences_per_rank * world_size, kLength});
  const auto symbols = all.slice(0, rank * sequences_per_rank, (rank + 1) * sequences_per_rank);
  const auto separator = torch::full({sequences_per_rank, 1}, kSeparator, torch::kLong);
  const auto text = torch::cat({symbols, separator, symbols.flip(1)}, 1);
  auto targets = text.slice(1, 1).clone();
  targets.slice(1, 0, kLength).fill_(-100);
  return {text.slice(1, 0, -1), targets};
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

// The mean over ranks, the same on each of them.
double mean_over_ranks(strata::comm::Collectives& ranks, double value) {
  double sum = 0.0;
  for (const std::string& text : ranks.all_gather_text(std::to_string(value)))
    sum += std::stod(text);
  return sum / ranks.world_size();
}

double train_step(strata::torch::Trainer& trainer, Model& model, int64_t step) {
  const int64_t micro_steps = trainer.accumulation_steps();
  double loss_sum = 0.0;
  for (int64_t micro = 0; micro < micro_steps; ++micro) {
    const Batch batch = make_batch(step * micro_steps + micro, trainer.micro_batch_size(),
                                   trainer.rank(), trainer.world_size());
    const auto loss = loss_of(trainer.forward(*model, batch.inputs), batch.targets);
    trainer.backward(loss);
    trainer.step();
    loss_sum += loss.item<double>();
  }
  return mean_over_ranks(trainer.collectives(), loss_sum / static_cast<double>(micro_steps));
}

// The difference between the loss under the engine and that of a plain model with the saved
// weights.
double compare_saved(strata::torch::Trainer& trainer, Model& model, const ModelSizes& sizes,
                     const std::string& folder) {
  const torch::NoGradGuard no_grad;
  const Batch batch = make_batch(-1, 32, 0, 1);
  const double trained =
      loss_of(trainer.forward(*model, batch.inputs), batch.targets).item<double>();
  trainer.save(folder);

  Model plain(sizes);
  const std::string for_evaluation = R"({"train_micro_batch_size_per_gpu": 1})";
  strata::torch::Trainer reader(
      plain.ptr(), {.config = for_evaluation, .collectives = strata::torch::single_rank(at::kCPU)});
  reader.load(folder);
  reader.close(/*keep_values=*/true);
  return std::abs(loss_of(plain->forward(batch.inputs), batch.targets).item<double>() - trained);
}

int run(const std::string& config, int64_t steps, const std::string& folder) {
  torch::manual_seed(0);
  ModelSizes sizes;
  sizes.vocabulary = kSymbols + 1;
  sizes.positions = 2 * kLength;
  Model model(sizes);
  strata::torch::Trainer trainer(model.ptr(), {.config = config});
  model->call = trainer.call();
  const bool speaks = trainer.rank() == 0;

  double first = 0.0, last = 0.0;
  for (int64_t step = 0; step < steps; ++step) {
    last = train_step(trainer, model, step);
    if (step == 0) first = last;
    if (speaks) {
      std::printf("step %3ld  loss %.6f  gradient norm %.4f\n", static_cast<long>(step + 1), last,
                  trainer.grad_norm().value_or(0.0));
    }
  }
  if (speaks) std::printf("rank 0 holds %s\n", trainer.ledger().report().c_str());
  bool good = last < first / 2;
  if (speaks && !good) std::printf("the loss did not fall to half: %f, then %f\n", first, last);
  if (!folder.empty()) {
    const double difference = compare_saved(trainer, model, sizes, folder);
    if (speaks)
      std::printf("saved to %s; loss of the saved weights differs by %g\n", folder.c_str(),
                  difference);
    good = good && difference < 1e-5;
  }
  trainer.close();
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CONFIG [STEPS [FOLDER]]\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1], argc > 2 ? std::atol(argv[2]) : 100, argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}
