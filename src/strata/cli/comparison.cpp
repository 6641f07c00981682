#include "strata/cli/comparison.h"

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/io/striping.h"

namespace strata::cli {
namespace {

std::string label_of(const SourceTensor& tensor) {
  return tensor.kind == format::kValue ? tensor.name
                                       : fmt::format("{} ({})", tensor.name, tensor.kind);
}

// Tensors of both sources, by name; notes the others.
std::vector<ComparedTensor> match(const TensorSource& a, const TensorSource& b,
                                  Comparison& comparison) {
  std::vector<ComparedTensor> result;
  std::set<const SourceTensor*> matched;
  for (const SourceTensor& tensor : a.tensors()) {
    const SourceTensor* other = b.find(tensor.name, tensor.kind);
    for (std::size_t i = 0; other == nullptr && i < tensor.aliases.size(); ++i)
      other = b.find(tensor.aliases[i], tensor.kind);
    if (other == nullptr) {
      comparison.only_a.push_back(label_of(tensor));
      continue;
    }
    matched.insert(other);
    ComparedTensor pair{&tensor, other, tensor.shape == other->shape, true, true, {}};
    if (a.is_training() == b.is_training()) pair.same_dtype = tensor.dtype == other->dtype;
    pair.compared = pair.same_shape && comparable(tensor.dtype, other->dtype);
    if (!pair.compared) pair.same_dtype = tensor.dtype == other->dtype;
    result.push_back(pair);
  }
  for (const SourceTensor& tensor : b.tensors()) {
    if (!matched.contains(&tensor)) comparison.only_b.push_back(label_of(tensor));
  }
  return result;
}

// Elements [begin, end) of a pair, which lie in one run of each.
struct PairPiece {
  std::size_t pair = 0;
  Numel begin;
  Numel end;
  const ElementRange* a = nullptr;
  const ElementRange* b = nullptr;
};

// The pieces of both, each pair in one buffer.
class PairSource final : public checkpoint::Source {
 public:
  PairSource(const TensorSource& a, const TensorSource& b, std::span<const ComparedTensor> pairs,
             io::IoEngine& io, Bytes buffer)
      : a_(a), b_(b), pairs_(pairs), io_(io), half_(buffer / 2 - buffer / 2 % 16_B) {}

  bool next(checkpoint::Piece& piece) override {
    while (pair_ < pairs_.size() && (!pairs_[pair_].compared || at_ == pairs_[pair_].a->numel)) {
      ++pair_;
      at_ = Numel();
      run_a_ = run_b_ = 0;
    }
    if (pair_ == pairs_.size()) return false;
    const ElementRange& a = run_at(pairs_[pair_].a->runs, run_a_);
    const ElementRange& b = run_at(pairs_[pair_].b->runs, run_b_);
    const Numel most(half_ / std::max(size_of(a.dtype), size_of(b.dtype)));
    pieces_.push_back({pair_, at_, std::min({a.end, b.end, at_ + most}), &a, &b});
    at_ = pieces_.back().end;
    piece.bytes = half_ * 2;
    return true;
  }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    const PairPiece& pair = pieces_.back();
    std::vector<std::unique_ptr<io::Transfer>> reads;
    reads.push_back(read(a_.file(pair.a->file), pair, *pair.a, a_of(pair, piece)));
    reads.push_back(read(b_.file(pair.b->file), pair, *pair.b, b_of(pair, piece)));
    return io::joined(std::move(reads));
  }

  // The one that was begun first.
  PairPiece taken() {
    const PairPiece piece = pieces_.front();
    pieces_.pop_front();
    return piece;
  }
  static std::span<std::byte> a_of(const PairPiece& pair, const checkpoint::Piece& piece) {
    return piece.content.first(bytes_of(pair.end - pair.begin, pair.a->dtype).size());
  }
  static std::span<std::byte> b_of(const PairPiece& pair, const checkpoint::Piece& piece) {
    return piece.content.subspan(piece.content.size() / 2,
                                 bytes_of(pair.end - pair.begin, pair.b->dtype).size());
  }

 private:
  const ElementRange& run_at(const std::vector<ElementRange>& runs, std::size_t& run) const {
    while (runs[run].end <= at_) ++run;
    return runs[run];
  }
  std::unique_ptr<io::Transfer> read(const io::File& file, const PairPiece& pair,
                                     const ElementRange& run, std::span<std::byte> target) {
    return io_.read(file, run.offset + bytes_of(pair.begin - run.begin, run.dtype), target);
  }

  const TensorSource& a_;
  const TensorSource& b_;
  std::span<const ComparedTensor> pairs_;
  io::IoEngine& io_;
  Bytes half_;
  std::size_t pair_ = 0;
  std::size_t run_a_ = 0;
  std::size_t run_b_ = 0;
  Numel at_;
  std::deque<PairPiece> pieces_;  // under way
};

class PairSink final : public checkpoint::Sink {
 public:
  PairSink(PairSource& source, const TensorSource& a, const TensorSource& b,
           std::span<ComparedTensor> pairs, Progress& progress)
      : source_(source), a_(a), b_(b), pairs_(pairs), progress_(progress) {}

  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    const PairPiece pair = source_.taken();
    ComparedTensor& compared = pairs_[pair.pair];
    const auto a = PairSource::a_of(pair, piece);
    const auto b = PairSource::b_of(pair, piece);
    meter_.add(a, pair.a->dtype, b, pair.b->dtype, rounding_of(compared), pair.begin,
               compared.difference);
    progress_.add(Bytes(a.size() + b.size()));
    return nullptr;
  }

 private:
  // Masters become what the other side has.
  std::optional<DType> rounding_of(const ComparedTensor& pair) const {
    if (a_.is_training() == b_.is_training() || !is_floating(pair.a->dtype)) return std::nullopt;
    return a_.is_training() ? pair.b->dtype : pair.a->dtype;
  }

  PairSource& source_;
  const TensorSource& a_;
  const TensorSource& b_;
  std::span<ComparedTensor> pairs_;
  Progress& progress_;
  DifferenceMeter meter_;
};

Bytes bytes_to_read(std::span<const ComparedTensor> pairs) {
  Bytes total;
  for (const ComparedTensor& pair : pairs) {
    if (!pair.compared) continue;
    for (const auto* tensor : {pair.a, pair.b}) {
      for (const ElementRange& run : tensor->runs)
        total += bytes_of(run.end - run.begin, run.dtype);
    }
  }
  return total;
}

}  // namespace

bool Comparison::equal() const {
  return only_a.empty() && only_b.empty() &&
         std::ranges::all_of(tensors, [](const ComparedTensor& pair) { return pair.equal(); });
}

Comparison compare(const TensorSource& a, const TensorSource& b, const ComparisonOptions& options,
                   io::IoEngine& io, const std::shared_ptr<memory::Ledger>& ledger,
                   Console& console) {
  for (const TensorSource* source : {&a, &b}) {
    if (!options.kinds || source->is_training()) continue;
    throw UsageError(
        fmt::format("--kinds compares optimizer states, which only training checkpoints hold; "
                    "leave it out: path={}",
                    source->path()));
  }
  Comparison comparison;
  comparison.a = a.path();
  comparison.b = b.path();
  comparison.top = options.top;
  comparison.tensors = match(a, b, comparison);
  Progress progress("comparing", bytes_to_read(comparison.tensors), console);
  checkpoint::TransferRing ring(options.ring, ledger);
  PairSource source(a, b, comparison.tensors, io, ring.buffer_bytes());
  PairSink sink(source, a, b, comparison.tensors, progress);
  copy(source, sink, ring);
  std::ranges::stable_sort(comparison.tensors, [](const auto& one, const auto& other) {
    if ((one.difference.differing.value > 0) != (other.difference.differing.value > 0))
      return one.difference.differing.value > 0;
    return one.difference.largest > other.difference.largest;
  });
  return comparison;
}

}  // namespace strata::cli
