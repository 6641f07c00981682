// What must hold of a manifest whatever its JSON says; manifest.h has the rules. FormatError.
#pragma once

#include <string_view>

#include "strata/format/manifest.h"

namespace strata::format {

void check_manifest(const Manifest& manifest, std::string_view path);

}  // namespace strata::format
