// errno in messages: its number and the system's words for it. Safe in every thread.
#pragma once

#include <string>
#include <system_error>

#include "strata/base/error.h"

namespace strata {

// "errno=28 (No space left on device)"
inline std::string errno_text(int code) {
  return fmt::format("errno={} ({})", code, std::generic_category().message(code));
}

}  // namespace strata
