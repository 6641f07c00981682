// Lists of units, by their numbers, as ranks tell each other of them in texts.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace strata::engine {

std::string text_of_units(std::span<const int> units);
std::vector<int> units_of_text(const std::string& text);

}  // namespace strata::engine
