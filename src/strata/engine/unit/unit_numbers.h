// Lists of units or parameters, by their numbers, as texts for other ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace strata::engine {

std::string text_of_numbers(std::span<const int> numbers);
std::vector<int> numbers_of_text(const std::string& text);

}  // namespace strata::engine
