// Renders docs/CONFIG.md from the key table, so that the page cannot differ from the parser. Pure.
#pragma once

#include <string>

namespace strata::engine {

std::string render_config_page();

}  // namespace strata::engine
