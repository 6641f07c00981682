// Finds the known word that a misspelled one most likely meant, whatever the case of letters. Pure
// functions.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace strata::engine {

// `text` with its ASCII letters in lower case.
std::string lower_case(std::string_view text);

// Edits (insert, remove, replace, swap of neighbours) that turn `a` into `b`, letter case ignored.
int edit_distance(std::string_view a, std::string_view b);

// The closest of `known`, the first of equals; empty when `known` is empty.
std::string_view nearest_of(std::string_view word, std::span<const std::string_view> known);

}  // namespace strata::engine
