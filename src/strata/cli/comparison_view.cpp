// A comparison as text and as JSON.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "strata/cli/comparison.h"
#include "strata/cli/text_table.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

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
