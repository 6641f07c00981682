#include "strata/cli/comparison.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/cli/console.h"
#include "strata/format/safetensors.h"
#include "strata/io/striping.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

bool is_float8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

template <typename T>
T element(std::span<const std::byte> bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// Wide enough for all integers: 64 bits and a sign. An element that is neither floating nor an
// integer counts as the number of its byte.
__extension__ using Wide = __int128;

Wide integer_at(std::span<const std::byte> bytes, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kInt64:
      return element<std::int64_t>(bytes, i);
    case DType::kInt32:
      return element<std::int32_t>(bytes, i);
    case DType::kInt16:
      return element<std::int16_t>(bytes, i);
    case DType::kInt8:
      return element<std::int8_t>(bytes, i);
    case DType::kUInt64:
      return element<std::uint64_t>(bytes, i);
    case DType::kUInt32:
      return element<std::uint32_t>(bytes, i);
    case DType::kUInt16:
      return element<std::uint16_t>(bytes, i);
    default:
      return element<std::uint8_t>(bytes, i);
  }
}

double distance(double a, double b) {
  if (std::isnan(a) || std::isnan(b))
    return std::isnan(a) == std::isnan(b) ? 0 : std::numeric_limits<double>::infinity();
  return a == b ? 0 : std::abs(a - b);
}

void note(ElementDifference& difference, double far, Numel at, double a, double b) {
  ++difference.differing.value;
  if (far <= difference.largest && difference.differing.value > 1) return;
  difference.largest = far;
  difference.at = at;
  difference.a = a;
  difference.b = b;
}

// The values in fp64, by way of `rounded_to`.
std::span<const double> widen(std::span<const std::byte> bytes, DType dtype,
                              std::optional<DType> rounded_to, std::vector<std::byte>& rounded,
                              std::vector<double>& wide) {
  const Numel count(Bytes(bytes.size()) / size_of(dtype));
  const std::byte* source = bytes.data();
  if (rounded_to && *rounded_to != dtype) {
    rounded.resize(bytes_of(count, *rounded_to).size());
    kernels::cast(rounded.data(), *rounded_to, source, dtype, count, nullptr);
    source = rounded.data();
    dtype = *rounded_to;
  }
  wide.resize(count.size());
  kernels::cast(std::as_writable_bytes(std::span(wide)).data(), DType::kFloat64, source, dtype,
                count, nullptr);
  return wide;
}

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

using Json = nlohmann::json;

constexpr std::size_t kNamesShown = 20;

std::string name_and_kind(const SourceTensor& tensor) {
  const std::string name = format::in_quotes(tensor.name);
  return tensor.kind == format::kValue ? name : fmt::format("{} ({})", name, tensor.kind);
}

// The place of an element in a tensor of this shape.
std::vector<std::int64_t> place_in(const std::vector<std::int64_t>& shape, Numel element) {
  std::vector<std::int64_t> place(shape.size());
  std::int64_t rest = element.value;
  for (std::size_t i = shape.size(); i-- > 0;) {
    place[i] = rest % shape[i];
    rest /= shape[i];
  }
  return place;
}

std::string names_text(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = fmt::format("{} ({}):\n", title, names.size());
  for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i)
    text += "  " + format::in_quotes(names[i]) + "\n";
  if (names.size() > kNamesShown)
    text += fmt::format("  and {} more (--json lists all)\n", names.size() - kNamesShown);
  return text;
}

std::string shapes_text(const Comparison& comparison) {
  std::string text;
  for (const ComparedTensor& pair : comparison.tensors) {
    const std::string name = name_and_kind(*pair.a);
    if (!pair.same_shape)
      text += fmt::format("{}: shape {} in A, {} in B\n", name, format::shape_text(pair.a->shape),
                          format::shape_text(pair.b->shape));
    if (!pair.same_dtype)
      text += fmt::format("{}: {} in A, {} in B\n", name, name_of(pair.a->dtype),
                          name_of(pair.b->dtype));
  }
  return text;
}

std::string number_text(const ElementDifference& difference, double number) {
  return difference.has_values ? fmt::format("{:.9g}", number) : "-";
}

std::string differences_text(const Comparison& comparison, std::size_t differing) {
  if (differing == 0) return "";
  TextTable table({"tensor", "largest difference", "at element", "A", "B", "elements that differ"});
  const std::size_t shown = std::min(differing, comparison.top);
  for (std::size_t i = 0; i < shown; ++i) {
    const ComparedTensor& pair = comparison.tensors[i];
    const ElementDifference& d = pair.difference;
    table.add({name_and_kind(*pair.a),
               d.has_values
                   ? (std::isinf(d.largest) ? "not finite" : fmt::format("{:.4g}", d.largest))
                   : "bytes",
               format::shape_text(place_in(pair.a->shape, d.at)), number_text(d, d.a),
               number_text(d, d.b),
               fmt::format("{} of {}", with_commas(d.differing.value),
                           with_commas(pair.a->numel.value))});
  }
  std::string text = table.text();
  if (shown < differing)
    text += fmt::format("and {} more; --top {} lists all\n", differing - shown, differing);
  return text;
}

std::size_t count_differing(const Comparison& comparison) {
  return static_cast<std::size_t>(std::ranges::count_if(
      comparison.tensors,
      [](const ComparedTensor& pair) { return pair.difference.differing.value > 0; }));
}

// JSON has no word for what is not finite.
Json json_number(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
}

Json json_of_difference(const ComparedTensor& pair) {
  const ElementDifference& d = pair.difference;
  Json json = {{"name", pair.a->name},
               {"kind", pair.a->kind},
               {"differing", d.differing.value},
               {"elements", pair.a->numel.value},
               {"at", d.at.value},
               {"place", place_in(pair.a->shape, d.at)}};
  if (!d.has_values) return json;
  json["largest"] = json_number(d.largest);
  json["a"] = json_number(d.a);
  json["b"] = json_number(d.b);
  return json;
}

}  // namespace

bool comparable(DType a, DType b) {
  if (a == b) return true;
  if (is_floating(a) != is_floating(b)) return false;
  return !is_float8(a) && !is_float8(b);
}

void DifferenceMeter::add(std::span<const std::byte> a, DType a_dtype, std::span<const std::byte> b,
                          DType b_dtype, std::optional<DType> rounded_to, Numel first,
                          ElementDifference& difference) {
  STRATA_ASSERT(comparable(a_dtype, b_dtype));
  if (is_float8(a_dtype)) difference.has_values = false;
  if (a_dtype == b_dtype && std::memcmp(a.data(), b.data(), a.size()) == 0) return;
  const auto count = static_cast<std::size_t>(Bytes(a.size()) / size_of(a_dtype));
  if (!is_floating(a_dtype)) {
    for (std::size_t i = 0; i < count; ++i) {
      const Wide one = integer_at(a, a_dtype, i);
      const Wide other = integer_at(b, b_dtype, i);
      if (one == other) continue;
      const Wide far = one > other ? one - other : other - one;
      note(difference, static_cast<double>(far), first + Numel(i), static_cast<double>(one),
           static_cast<double>(other));
    }
    return;
  }
  const auto ones = widen(a, a_dtype, rounded_to, rounded_, a_);
  const auto others = widen(b, b_dtype, rounded_to, rounded_, b_);
  for (std::size_t i = 0; i < count; ++i) {
    const double far = distance(ones[i], others[i]);
    if (far > 0) note(difference, far, first + Numel(i), ones[i], others[i]);
  }
}

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

std::string text_of(const Comparison& comparison) {
  const std::size_t differing = count_differing(comparison);
  std::string text = fmt::format("A  {}\nB  {}\n", comparison.a, comparison.b);
  text += names_text("only in A", comparison.only_a);
  text += names_text("only in B", comparison.only_b);
  text += shapes_text(comparison);
  text += differences_text(comparison, differing);
  const auto compared = static_cast<std::size_t>(
      std::ranges::count_if(comparison.tensors, [](const auto& pair) { return pair.compared; }));
  if (comparison.equal())
    return text + fmt::format("equal: {} compared\n", count_of(compared, "tensor"));
  return text + fmt::format("DIFFERENT: {} compared, the values of {} differ\n",
                            count_of(compared, "tensor"), differing);
}

Json json_of(const Comparison& comparison) {
  const std::size_t differing = count_differing(comparison);
  Json json = {{"a", comparison.a},           {"b", comparison.b},
               {"equal", comparison.equal()}, {"only_a", comparison.only_a},
               {"only_b", comparison.only_b}, {"tensors", comparison.tensors.size()},
               {"differing", differing},      {"shapes", Json::array()},
               {"dtypes", Json::array()},     {"largest", Json::array()}};
  for (const ComparedTensor& pair : comparison.tensors) {
    const Json name = {{"name", pair.a->name}, {"kind", pair.a->kind}};
    if (!pair.same_shape) {
      json["shapes"].push_back(name);
      json["shapes"].back().update({{"a", pair.a->shape}, {"b", pair.b->shape}});
    }
    if (!pair.same_dtype) {
      json["dtypes"].push_back(name);
      json["dtypes"].back().update({{"a", name_of(pair.a->dtype)}, {"b", name_of(pair.b->dtype)}});
    }
  }
  for (std::size_t i = 0; i < std::min(differing, comparison.top); ++i)
    json["largest"].push_back(json_of_difference(comparison.tensors[i]));
  return json;
}

}  // namespace strata::cli
