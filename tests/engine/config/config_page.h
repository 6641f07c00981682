// docs/CONFIG.md, rendered from the tables of keys, so that the page cannot differ from the parser.
// A pure function.
#pragma once

#include <string>

namespace strata::engine {

std::string render_config_page();

}  // namespace strata::engine
