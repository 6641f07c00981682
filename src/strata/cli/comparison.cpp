#include "strata/cli/comparison.h"

#include <fmt/core.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>

#include "strata/checkpoint/pipeline.h"
#include "strata/cli/commands.h"
#include "strata/io/striping.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr checkpoint::RingOptions kRing{8, 8_MiB};  // half of a buffer is for each of the two
constexpr std::size_t kNamesShown = 20;

// A tensor of both.
struct ComparedTensor {
  const SourceTensor* a = nullptr;
  const SourceTensor* b = nullptr;
  bool same_shape = true;
  bool same_dtype = true;
  bool compared = true;                  // false: shapes or dtypes do not allow it
  std::optional<DType> rounded_to = {};  // masters become what the other side has
  ElementDifference difference = {};

  bool differs() const { return difference.differing.value > 0; }
};

bool is_float8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

// Wide enough for all integers: 64 bits and a sign. An element that is neither floating nor an
// integer counts as the number of its byte.
__extension__ using Wide = __int128;

Wide integer_at(std::span<const std::byte> bytes, DType dtype, std::size_t i) {
  const std::size_t size = size_of(dtype).size();
  std::uint64_t bits = 0;
  std::memcpy(&bits, bytes.data() + i * size, size);
  if (dtype < DType::kInt64 || dtype > DType::kInt8) return bits;
  const std::size_t unused = 64 - 8 * size;
  return static_cast<std::int64_t>(bits << unused) >> unused;
}

double distance(double a, double b) {
  if (std::isnan(a) || std::isnan(b))
    return std::isnan(a) == std::isnan(b) ? 0 : std::numeric_limits<double>::infinity();
  return a == b ? 0 : std::abs(a - b);
}

void note(ElementDifference& difference, double far, Numel at, double a, double b) {
  ++difference.differing.value;
  if (far <= difference.largest && difference.differing.value > 1) return;
  difference = {difference.differing, far, at, a, b, difference.has_values};
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

// Its name, and its kind where that is not the value.
std::string label_of(const std::string& name, const SourceTensor& tensor) {
  return tensor.kind == format::kValue ? name : fmt::format("{} ({})", name, tensor.kind);
}

// Tensors of both sources, by name; adds the labels of the others.
std::vector<ComparedTensor> match(const TensorSource& a, const TensorSource& b,
                                  std::vector<std::string>& only_a,
                                  std::vector<std::string>& only_b) {
  std::vector<ComparedTensor> result;
  std::set<const SourceTensor*> matched;
  for (const SourceTensor& tensor : a.tensors()) {
    const SourceTensor* other = b.find(tensor.name, tensor.kind);
    for (std::size_t i = 0; other == nullptr && i < tensor.aliases.size(); ++i)
      other = b.find(tensor.aliases[i], tensor.kind);
    if (other == nullptr) {
      only_a.push_back(label_of(tensor.name, tensor));
      continue;
    }
    matched.insert(other);
    ComparedTensor pair{&tensor, other, tensor.shape == other->shape};
    const bool alike = a.is_training() == b.is_training();
    pair.compared = pair.same_shape && comparable(tensor.dtype, other->dtype);
    pair.same_dtype = (!alike && pair.compared) || tensor.dtype == other->dtype;
    if (!alike && is_floating(tensor.dtype))
      pair.rounded_to = a.is_training() ? other->dtype : tensor.dtype;
    result.push_back(pair);
  }
  for (const SourceTensor& tensor : b.tensors()) {
    if (!matched.contains(&tensor)) only_b.push_back(label_of(tensor.name, tensor));
  }
  return result;
}

// Elements [begin, end) of a pair, which lie in one run of each.
struct PairPiece {
  Numel begin;
  Numel end;
  const ElementRange& a;
  const ElementRange& b;

  // In the halves of a buffer.
  std::span<std::byte> of_a(std::span<std::byte> content) const {
    return content.first(bytes_of(end - begin, a.dtype).size());
  }
  std::span<std::byte> of_b(std::span<std::byte> content) const {
    return content.subspan(content.size() / 2, bytes_of(end - begin, b.dtype).size());
  }
};

// The elements of a pipeline's piece, whose offset counts elements of a pair: as many as half of a
// buffer holds.
PairPiece piece_of(std::span<const ComparedTensor> pairs, const checkpoint::Piece& piece) {
  const ComparedTensor& pair = pairs[piece.file];
  const Numel begin(piece.offset.value);
  const ElementRange& a = *std::ranges::upper_bound(pair.a->runs, begin, {}, &ElementRange::end);
  const ElementRange& b = *std::ranges::upper_bound(pair.b->runs, begin, {}, &ElementRange::end);
  const Numel most(piece.bytes / 2 / std::max(size_of(a.dtype), size_of(b.dtype)));
  return {begin, std::min({a.end, b.end, begin + most}), a, b};
}

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
    }
    if (pair_ == pairs_.size()) return false;
    piece.file = pair_;
    piece.offset = Bytes(at_.value);
    piece.bytes = half_ * 2;
    at_ = piece_of(pairs_, piece).end;
    return true;
  }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    const PairPiece pair = piece_of(pairs_, piece);
    std::vector<std::unique_ptr<io::Transfer>> reads;
    reads.push_back(read(a_, pair.begin, pair.a, pair.of_a(piece.content)));
    reads.push_back(read(b_, pair.begin, pair.b, pair.of_b(piece.content)));
    return io::joined(std::move(reads));
  }

 private:
  std::unique_ptr<io::Transfer> read(const TensorSource& source, Numel begin,
                                     const ElementRange& run, std::span<std::byte> target) {
    return io_.read(source.file(run.file), run.offset + bytes_of(begin - run.begin, run.dtype),
                    target);
  }

  const TensorSource& a_;
  const TensorSource& b_;
  std::span<const ComparedTensor> pairs_;
  io::IoEngine& io_;
  Bytes half_;
  std::size_t pair_ = 0;
  Numel at_;
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

std::string shapes_text(std::span<const ComparedTensor> pairs) {
  std::string text;
  for (const ComparedTensor& pair : pairs) {
    const std::string name = label_of(format::in_quotes(pair.a->name), *pair.a);
    if (!pair.same_shape)
      text += fmt::format("{}: shape {} in A, {} in B\n", name, format::shape_text(pair.a->shape),
                          format::shape_text(pair.b->shape));
    if (!pair.same_dtype)
      text += fmt::format("{}: {} in A, {} in B\n", name, name_of(pair.a->dtype),
                          name_of(pair.b->dtype));
  }
  return text;
}

// A table of the first `top` pairs that differ.
std::string differences_text(std::span<const ComparedTensor> differing, std::size_t top) {
  if (differing.empty()) return "";
  TextTable table({"tensor", "largest difference", "at element", "A", "B", "elements that differ"});
  for (const ComparedTensor& pair : differing.first(std::min(differing.size(), top))) {
    const ElementDifference& d = pair.difference;
    const auto number = [&](double value) {
      return d.has_values ? fmt::format("{:.9g}", value) : "-";
    };
    table.add({label_of(format::in_quotes(pair.a->name), *pair.a),
               !d.has_values           ? "bytes"
               : std::isinf(d.largest) ? "not finite"
                                       : fmt::format("{:.4g}", d.largest),
               format::shape_text(place_in(pair.a->shape, d.at)), number(d.a), number(d.b),
               fmt::format("{} of {}", with_commas(d.differing.value),
                           with_commas(pair.a->numel.value))});
  }
  std::string text = table.text();
  if (top < differing.size())
    text +=
        fmt::format("and {} more; --top {} lists all\n", differing.size() - top, differing.size());
  return text;
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

Json json_of(std::span<const ComparedTensor> pairs, std::span<const ComparedTensor> differing,
             std::size_t top) {
  Json json = {{"tensors", pairs.size()},
               {"differing", differing.size()},
               {"shapes", Json::array()},
               {"dtypes", Json::array()},
               {"largest", Json::array()}};
  const auto add = [&](const char* what, const ComparedTensor& pair, const Json& a, const Json& b) {
    json[what].push_back({{"name", pair.a->name}, {"kind", pair.a->kind}, {"a", a}, {"b", b}});
  };
  for (const ComparedTensor& pair : pairs) {
    if (!pair.same_shape) add("shapes", pair, pair.a->shape, pair.b->shape);
    if (!pair.same_dtype) add("dtypes", pair, name_of(pair.a->dtype), name_of(pair.b->dtype));
  }
  for (const ComparedTensor& pair : differing.first(std::min(differing.size(), top)))
    json["largest"].push_back(json_of_difference(pair));
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

Report compare(const ComparisonRequest& request, Console& console) {
  const TensorSource a(request.a, request.kinds);
  const TensorSource b(request.b, request.kinds);
  for (const TensorSource* source : {&a, &b}) {
    if (!request.kinds || source->is_training()) continue;
    throw UsageError(
        "--kinds compares optimizer states, which only training checkpoints hold; leave it out: "
        "path={}",
        source->path());
  }
  std::vector<std::string> only_a;
  std::vector<std::string> only_b;
  std::vector<ComparedTensor> pairs = match(a, b, only_a, only_b);
  {
    io::ThreadEngine io;
    Progress progress("comparing", bytes_to_read(pairs), console);
    checkpoint::TransferRing ring(kRing, nullptr);
    PairSource source(a, b, pairs, io, ring.buffer_bytes());
    DifferenceMeter meter;
    checkpoint::Taker sink([&](const checkpoint::Piece& piece) {
      const PairPiece pair = piece_of(pairs, piece);
      ComparedTensor& compared = pairs[piece.file];
      const auto in_a = pair.of_a(piece.content);
      const auto in_b = pair.of_b(piece.content);
      meter.add(in_a, pair.a.dtype, in_b, pair.b.dtype, compared.rounded_to, pair.begin,
                compared.difference);
      progress.add(Bytes(in_a.size() + in_b.size()));
      return nullptr;
    });
    copy(source, sink, ring);
  }
  std::ranges::stable_sort(pairs, [](const ComparedTensor& one, const ComparedTensor& other) {
    if (one.differs() != other.differs()) return one.differs();
    return one.difference.largest > other.difference.largest;
  });
  const auto count = [&](auto which) {
    return static_cast<std::size_t>(std::ranges::count_if(pairs, which));
  };
  const auto differing = std::span(std::as_const(pairs)).first(count(&ComparedTensor::differs));
  const std::size_t compared = count(&ComparedTensor::compared);
  const bool equal = only_a.empty() && only_b.empty() && differing.empty() &&
                     std::ranges::all_of(pairs, &ComparedTensor::same_shape) &&
                     std::ranges::all_of(pairs, &ComparedTensor::same_dtype);
  Json json = json_of(pairs, differing, request.top);
  json.update(
      {{"a", a.path()}, {"b", b.path()}, {"equal", equal}, {"only_a", only_a}, {"only_b", only_b}});
  return {json,
          fmt::format("A  {}\nB  {}\n", a.path(), b.path()) + names_text("only in A", only_a) +
              names_text("only in B", only_b) + shapes_text(pairs) +
              differences_text(differing, request.top) +
              (equal ? fmt::format("equal: {} compared\n", count_of(compared, "tensor"))
                     : fmt::format("DIFFERENT: {} compared, the values of {} differ\n",
                                   count_of(compared, "tensor"), differing.size())),
          equal};
}

}  // namespace strata::cli
