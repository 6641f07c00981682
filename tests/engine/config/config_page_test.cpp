#include "strata/engine/config/config_page.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace strata::engine {
namespace {

TEST(ConfigPage, IsTheOneInTheRepository) {
  std::ifstream file(STRATA_CONFIG_PAGE);
  ASSERT_TRUE(file) << STRATA_CONFIG_PAGE;
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_TRUE(page.str() == render_config_page())
      << "docs/CONFIG.md is out of date; write it again: ninja strata_config_doc, then "
         "strata_config_doc docs/CONFIG.md";
}

}  // namespace
}  // namespace strata::engine
