// Gives all ranks one outcome of a step that each of them does for itself, such as reading its part
// of a file. Otherwise a rank whose disk fails would leave, while the others wait for it at the
// next collective.
#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

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

}  // namespace strata::engine
