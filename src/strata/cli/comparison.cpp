#include "strata/cli/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "strata/base/error.h"

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
  const ElementRun* a = nullptr;
  const ElementRun* b = nullptr;
};

class PairPieces {
 public:
  PairPieces(std::span<const ComparedTensor> pairs, Bytes buffer)
      : pairs_(pairs), buffer_(buffer) {}

  std::optional<PairPiece> next() {
    while (pair_ < pairs_.size() && (!pairs_[pair_].compared || at_ == pairs_[pair_].a->numel)) {
      ++pair_;
      at_ = Numel();
      run_a_ = run_b_ = 0;
    }
    if (pair_ == pairs_.size()) return std::nullopt;
    const ElementRun& a = run_at(pairs_[pair_].a->runs, run_a_);
    const ElementRun& b = run_at(pairs_[pair_].b->runs, run_b_);
    const Numel most(buffer_ / std::max(size_of(a.dtype), size_of(b.dtype)));
    const PairPiece piece{pair_, at_, std::min({a.end, b.end, at_ + most}), &a, &b};
    at_ = piece.end;
    return piece;
  }

 private:
  const ElementRun& run_at(const std::vector<ElementRun>& runs, std::size_t& run) const {
    while (runs[run].end <= at_) ++run;
    return runs[run];
  }

  std::span<const ComparedTensor> pairs_;
  Bytes buffer_;
  std::size_t pair_ = 0;
  std::size_t run_a_ = 0;
  std::size_t run_b_ = 0;
  Numel at_;
};

class Comparer {
 public:
  Comparer(const TensorSource& a, const TensorSource& b, std::span<ComparedTensor> pairs,
           const ComparisonOptions& options, io::IoEngine& io,
           const std::shared_ptr<memory::Ledger>& ledger)
      : a_(a),
        b_(b),
        pairs_(pairs),
        io_(io),
        ring_a_(options.ring, ledger),
        ring_b_(options.ring, ledger),
        pieces_(pairs, options.ring.buffer_bytes),
        under_way_(options.ring.buffers) {}

  void run(Progress& progress) {
    std::optional<PairPiece> next = pieces_.next();
    for (std::size_t taken = 0, begun = 0;; ++taken) {
      for (; next && begun - taken < under_way_.size(); ++begun, next = pieces_.next()) {
        under_way_[begun % under_way_.size()] = *next;
        begin(ring_a_, begun, *next, a_.file(next->a->file), *next->a);
        begin(ring_b_, begun, *next, b_.file(next->b->file), *next->b);
      }
      if (taken == begun) return;
      progress.add(take(taken));
    }
  }

 private:
  static std::span<std::byte> place_of(BufferRing& ring, std::size_t turn, const PairPiece& piece,
                                       const ElementRun& run) {
    return ring.buffer(turn).first(bytes_of(piece.end - piece.begin, run.dtype).size());
  }

  void begin(BufferRing& ring, std::size_t turn, const PairPiece& piece, const io::File& file,
             const ElementRun& run) {
    const Bytes offset = run.offset + bytes_of(piece.begin - run.begin, run.dtype);
    ring.started(turn, io_.read(file, offset, place_of(ring, turn, piece, run)));
  }

  Bytes take(std::size_t turn) {
    const PairPiece& piece = under_way_[turn % under_way_.size()];
    ComparedTensor& pair = pairs_[piece.pair];
    const auto a = place_of(ring_a_, turn, piece, *piece.a);
    const auto b = place_of(ring_b_, turn, piece, *piece.b);
    meter_.add(a, piece.a->dtype, b, piece.b->dtype, rounding_of(pair), piece.begin,
               pair.difference);
    return Bytes(a.size() + b.size());
  }

  // Masters become what the other side has.
  std::optional<DType> rounding_of(const ComparedTensor& pair) const {
    if (a_.is_training() == b_.is_training() || !is_floating(pair.a->dtype)) return std::nullopt;
    return a_.is_training() ? pair.b->dtype : pair.a->dtype;
  }

  const TensorSource& a_;
  const TensorSource& b_;
  std::span<ComparedTensor> pairs_;
  io::IoEngine& io_;
  BufferRing ring_a_;
  BufferRing ring_b_;
  PairPieces pieces_;
  std::vector<PairPiece> under_way_;  // by turn
  DifferenceMeter meter_;
};

Bytes bytes_to_read(std::span<const ComparedTensor> pairs) {
  Bytes total;
  for (const ComparedTensor& pair : pairs) {
    if (!pair.compared) continue;
    for (const auto* tensor : {pair.a, pair.b}) {
      for (const ElementRun& run : tensor->runs) total += bytes_of(run.end - run.begin, run.dtype);
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
  Comparer(a, b, comparison.tensors, options, io, ledger).run(progress);
  std::ranges::stable_sort(comparison.tensors, [](const auto& one, const auto& other) {
    if ((one.difference.differing.value > 0) != (other.difference.differing.value > 0))
      return one.difference.differing.value > 0;
    return one.difference.largest > other.difference.largest;
  });
  return comparison;
}

}  // namespace strata::cli
