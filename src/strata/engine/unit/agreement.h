// Gives all ranks one outcome of a step that each of them does for itself, such as reading its part
// of a file. Otherwise a rank whose disk fails would leave, while the others wait for it at the
// next collective.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"

namespace strata::engine {

// An error of a rank: the name of its class ("IoError"; any other name stands for Error) and its
// message. An empty kind: no error.
struct Failure {
  std::string kind;
  std::string message;
};

Failure failure_of(const std::exception_ptr& error);

// Collective. Returns if no rank failed; else throws, on every rank, an error of the class that the
// first failed rank had, whose message names that rank and `what` it was doing. If all ranks failed
// alike, each throws its own message.
void agree_on_outcome(comm::Collectives& collectives, std::string_view what, const Failure& mine);

// Collective. Runs `part`, which takes part in no collective itself, and agrees on its outcome.
template <typename Part>
void agree_after(comm::Collectives& collectives, std::string_view what, Part&& part) {
  Failure mine;
  try {
    std::forward<Part>(part)();
  } catch (const CommError&) {
    throw;  // the others know already
  } catch (...) {
    mine = failure_of(std::current_exception());
  }
  agree_on_outcome(collectives, what, mine);
}

// The same, but a rank whose part failed throws that error itself.
template <typename Part>
void run_and_agree(comm::Collectives& collectives, std::string_view what, Part&& part) {
  std::exception_ptr mine;
  try {
    std::forward<Part>(part)();
  } catch (...) {
    mine = std::current_exception();
  }
  try {
    agree_on_outcome(collectives, what, mine != nullptr ? failure_of(mine) : Failure());
  } catch (...) {
    if (mine == nullptr) throw;
  }
  if (mine != nullptr) std::rethrow_exception(mine);
}

// Collective. Compares every rank's `text` with rank 0's, line by line. If they differ, throws
// ConfigError on every rank, with the first differing line, rank 0's text there, that of the first
// other rank, and the ranks that differ. `what` names the thing ("model", "configuration").
void agree_on_text(comm::Collectives& collectives, const std::string& what,
                   const std::string& text);

// Lists of units or parameters, by their numbers, as texts for other ranks.

std::string text_of_numbers(std::span<const int> numbers);
std::vector<int> numbers_of_text(const std::string& text);

}  // namespace strata::engine
