// A fresh directory that is removed with all it holds.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "strata/base/error.h"

namespace strata::comm::conformance {

class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "strata-XXXXXX").string();
    STRATA_ASSERT(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace strata::comm::conformance
