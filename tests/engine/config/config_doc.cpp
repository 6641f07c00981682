// strata_config_doc FILE: writes docs/CONFIG.md.
#include <fstream>
#include <iostream>

#include "engine/config/config_page.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: strata_config_doc FILE\n";
    return 2;
  }
  std::ofstream file(argv[1], std::ios::binary);
  file << strata::engine::render_config_page();
  file.close();
  if (!file) {
    std::cerr << "cannot write " << argv[1] << "\n";
    return 1;
  }
  return 0;
}
