#include "strata/cli/comparison.h"

#include <fmt/core.h>

#include <array>
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

constexpr checkpoint::RingOptions kRing{8, 8_MiB};
constexpr Bytes kHalf = kRing.buffer_bytes / 2;  // of a buffer: for each of the two
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

// Elements of a tensor, which lie in one of its runs.
struct Part {
  const io::File& file;
  Bytes offset;
  Bytes bytes;
  DType dtype;
};

// The same elements of both, from `begin` on.
struct PairPiece {
  std::size_t pair;
  Numel begin;
  std::array<Part, 2> parts;
};

// All elements that are compared: in each piece as many as half of a buffer holds.
std::vector<PairPiece> pieces_of(std::span<const ComparedTensor> pairs, const TensorSource& a,
                                 const TensorSource& b) {
  std::vector<PairPiece> pieces;
  for (std::size_t p = 0; p < pairs.size(); ++p) {
    if (!pairs[p].compared) continue;
    auto in_a = pairs[p].a->runs.begin();
    auto in_b = pairs[p].b->runs.begin();
    for (Numel at, end; at < pairs[p].a->numel; at = end) {
      while (in_a->end <= at) ++in_a;
      while (in_b->end <= at) ++in_b;
      const Bytes element = std::max(size_of(in_a->dtype), size_of(in_b->dtype));
      end = std::min({in_a->end, in_b->end, at + Numel(kHalf / element)});
      const auto part = [&](const TensorSource& source, const format::ManifestRange& run) {
        return Part{source.file(run.file), run.offset + bytes_of(at - run.begin, run.dtype),
                    bytes_of(end - at, run.dtype), run.dtype};
      };
      pieces.push_back({p, at, {part(a, *in_a), part(b, *in_b)}});
    }
  }
  return pieces;
}

// The parts of each piece, in the halves of one buffer.
class PairSource final : public checkpoint::Source {
 public:
  PairSource(std::span<const PairPiece> pieces, io::IoEngine& io) : pieces_(pieces), io_(io) {}

  bool next(checkpoint::Piece& piece) override {
    piece.bytes = kRing.buffer_bytes;
    return next_++ < pieces_.size();
  }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    const auto& [a, b] = pieces_[piece.index].parts;
    std::vector<std::unique_ptr<io::Transfer>> reads;
    reads.push_back(io_.read(a.file, a.offset, piece.content.first(a.bytes.size())));
    reads.push_back(
        io_.read(b.file, b.offset, piece.content.subspan(kHalf.size(), b.bytes.size())));
    return io::joined(std::move(reads));
  }

 private:
  std::span<const PairPiece> pieces_;
  io::IoEngine& io_;
  std::size_t next_ = 0;
};

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

// JSON has no word for what is not finite.
Json json_number(double number) {
  if (std::isfinite(number)) return number;
  return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
}

void add_unlike(Report& report, const ComparedTensor& pair) {
  const auto add = [&](const char* what, const Json& a, const Json& b, const std::string& text) {
    report.json[what].push_back(
        {{"name", pair.a->name}, {"kind", pair.a->kind}, {"a", a}, {"b", b}});
    report.text +=
        fmt::format("{}: {}\n", label_of(format::in_quotes(pair.a->name), *pair.a), text);
  };
  const auto& [a, b] = std::pair(pair.a, pair.b);
  if (!pair.same_shape)
    add("shapes", a->shape, b->shape,
        fmt::format("shape {} in A, {} in B", format::shape_text(a->shape),
                    format::shape_text(b->shape)));
  if (!pair.same_dtype)
    add("dtypes", name_of(a->dtype), name_of(b->dtype),
        fmt::format("{} in A, {} in B", name_of(a->dtype), name_of(b->dtype)));
}

// The first `top` pairs that differ.
void add_differences(Report& report, std::span<const ComparedTensor> differing, std::size_t top) {
  TextTable table({"tensor", "largest difference", "at element", "A", "B", "elements that differ"});
  for (const ComparedTensor& pair : differing.first(std::min(differing.size(), top))) {
    const ElementDifference& d = pair.difference;
    const auto place = place_in(pair.a->shape, d.at);
    Json json = {{"name", pair.a->name},
                 {"kind", pair.a->kind},
                 {"differing", d.differing.value},
                 {"elements", pair.a->numel.value},
                 {"at", d.at.value},
                 {"place", place}};
    std::vector<std::string> row{
        label_of(format::in_quotes(pair.a->name), *pair.a),
        "bytes",
        format::shape_text(place),
        "-",
        "-",
        fmt::format("{} of {}", with_commas(d.differing.value), with_commas(pair.a->numel.value))};
    if (d.has_values) {
      json.update(
          {{"largest", json_number(d.largest)}, {"a", json_number(d.a)}, {"b", json_number(d.b)}});
      row[1] = std::isinf(d.largest) ? "not finite" : fmt::format("{:.4g}", d.largest);
      row[3] = fmt::format("{:.9g}", d.a);
      row[4] = fmt::format("{:.9g}", d.b);
    }
    report.json["largest"].push_back(std::move(json));
    table.add(std::move(row));
  }
  if (!differing.empty()) report.text += table.text();
  if (top < differing.size())
    report.text +=
        fmt::format("and {} more; --top {} lists all\n", differing.size() - top, differing.size());
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
    const std::vector<PairPiece> pieces = pieces_of(pairs, a, b);
    Bytes total;
    for (const PairPiece& piece : pieces) total += piece.parts[0].bytes + piece.parts[1].bytes;
    io::ThreadEngine io;
    Progress progress("comparing", total, console);
    checkpoint::TransferRing ring(kRing, nullptr);
    PairSource source(pieces, io);
    DifferenceMeter meter;
    checkpoint::Taker sink([&](const checkpoint::Piece& piece) {
      const auto& [pair, begin, parts] = pieces[piece.index];
      meter.add(piece.content.first(parts[0].bytes.size()), parts[0].dtype,
                piece.content.subspan(kHalf.size(), parts[1].bytes.size()), parts[1].dtype,
                pairs[pair].rounded_to, begin, pairs[pair].difference);
      progress.add(parts[0].bytes + parts[1].bytes);
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
  Report report{{{"a", a.path()},
                 {"b", b.path()},
                 {"equal", equal},
                 {"tensors", pairs.size()},
                 {"differing", differing.size()},
                 {"only_a", only_a},
                 {"only_b", only_b},
                 {"shapes", Json::array()},
                 {"dtypes", Json::array()},
                 {"largest", Json::array()}},
                fmt::format("A  {}\nB  {}\n", a.path(), b.path()) +
                    names_text("only in A", only_a) + names_text("only in B", only_b),
                equal};
  for (const ComparedTensor& pair : pairs) add_unlike(report, pair);
  add_differences(report, differing, request.top);
  const std::string number = count_of(compared, "tensor");
  report.text += equal ? fmt::format("equal: {} compared\n", number)
                       : fmt::format("DIFFERENT: {} compared, the values of {} differ\n", number,
                                     differing.size());
  return report;
}

}  // namespace strata::cli
