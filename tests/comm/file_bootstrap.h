// Bootstrap through files of one directory that all ranks see: for programs without torch, and
// tests. The directory must be new to the job: make one for each start, and remove it when the job
// has ended. Only its owner may read what is written there; links that lie there are not followed.
// Threads: one. Errors: CommError that names the ranks that did not write within the
// timeout, or says that the directory holds files of another start; IoError.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"

namespace strata::comm {

class FileBootstrap final : public Bootstrap {
 public:
  // Creates the directory if need be.
  FileBootstrap(std::filesystem::path directory, int rank, int world_size,
                std::chrono::milliseconds timeout = std::chrono::minutes(5));

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::vector<std::string> exchange(const std::string& text) override;

 private:
  std::filesystem::path path_of(std::uint64_t exchange, int rank) const;
  void write_own(const std::string& text);
  std::vector<std::string> read_all();

  std::filesystem::path directory_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  std::uint64_t exchanges_ = 0;
};

}  // namespace strata::comm
