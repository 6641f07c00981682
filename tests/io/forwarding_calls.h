// FolderCalls that forward to the kernel, for tests that change some of them. Threads: safe
// everywhere.
#pragma once

#include <optional>
#include <string>

#include "strata/io/folder_calls.h"

namespace strata::testing {

class ForwardingCalls : public io::FolderCalls {
 public:
  void make_folder(const std::string& path) override { kernel_.make_folder(path); }
  std::optional<Bytes> free_space(const std::string& folder) override {
    return kernel_.free_space(folder);
  }
  io::File create(const std::string& path) override { return kernel_.create(path); }
  void reserve(io::File& file, Bytes bytes) override { kernel_.reserve(file, bytes); }
  void sync_file(io::File& file) override { kernel_.sync_file(file); }
  void sync_folder(const std::string& path) override { kernel_.sync_folder(path); }
  void rename(const std::string& from, const std::string& to) override { kernel_.rename(from, to); }
  bool exchange(const std::string& one, const std::string& other) override {
    return kernel_.exchange(one, other);
  }
  void remove_tree(const std::string& path) override { kernel_.remove_tree(path); }
  void open_to_others(const io::File& file) override { kernel_.open_to_others(file); }

 private:
  io::FolderCalls kernel_;
};

}  // namespace strata::testing
