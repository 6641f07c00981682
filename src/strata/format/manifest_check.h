// Checks the rules of a manifest (manifest.h), for any JSON. Errors: FormatError.
#pragma once

#include <string_view>

#include "strata/format/manifest.h"

namespace strata::format {

void check_manifest(const Manifest& manifest, std::string_view path);

}  // namespace strata::format
