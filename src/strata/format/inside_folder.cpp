#include "strata/format/inside_folder.h"

#include <fmt/core.h>

#include <filesystem>
#include <system_error>

#include "strata/base/error.h"

namespace strata::format {

void require_inside(const std::string& folder, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path file = fs::canonical(path, error);
  const fs::path home = error ? fs::path() : fs::canonical(folder, error);
  if (error || file.parent_path() == home) return;
  throw FormatError(
      fmt::format("a file of a checkpoint is a link that leads out of its folder; copy it there if "
                  "it belongs to it: path={} leads to={}",
                  path, file.string()));
}

}  // namespace strata::format
