// A disk that may fail: one operation ends with an error, or the power fails at one operation. The
// power failure may lose or tear the bytes written to a file since its last sync; it may undo the
// changes of names in a folder since the folder's last sync, the latest first. The disk works on a
// real folder. Threads: safe everywhere.
#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {

class CrashingDisk final : public io::FolderCalls {
 public:
  enum class Fault { kNone, kError, kPower };

  // `graveyard`: an empty folder that keeps removed files until their removal is on disk.
  CrashingDisk(unsigned seed, std::string graveyard)
      : random_(seed), graveyard_(std::move(graveyard)) {}

  // The operation of this number (from 0 on) fails.
  void fail_at(int operation, Fault fault) {
    const std::lock_guard lock(mutex_);
    left_ = operation;
    fault_ = fault;
  }
  int operations() {
    const std::lock_guard lock(mutex_);
    return count_;
  }
  bool power_failed() {
    const std::lock_guard lock(mutex_);
    return dead_;
  }
  // For a test of the test: files are never brought to disk.
  void forget_syncs() { forgets_ = true; }

  // Applies the losses of the power failure to the folder. Call it when no thread uses the disk.
  void restart() {
    const std::lock_guard lock(mutex_);
    for (const Written& written : written_) lose(written);
    const std::size_t stay = names_.empty() ? 0 : random_() % (names_.size() + 1);
    while (names_.size() > stay) {
      names_.back()();
      names_.pop_back();
    }
    written_.clear();
    names_.clear();
    dead_ = false;
    left_ = -1;
  }

  void wrote(const std::string& path, Bytes offset, Bytes bytes) {
    const std::lock_guard lock(mutex_);
    next("write");
    written_.push_back({path, offset, bytes});
  }
  void require_power() {
    const std::lock_guard lock(mutex_);
    if (dead_) throw IoError("no power");
  }

  void make_folder(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    next("make_folder");
    kernel_.make_folder(path);
    names_.push_back([this, path] { kernel_.remove_tree(path); });
  }
  io::File create(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    next("create");
    io::File file = kernel_.create(path);
    names_.push_back([this, path] { kernel_.remove_tree(path); });
    return file;
  }
  std::optional<Bytes> free_space(const std::string& folder) override {
    return kernel_.free_space(folder);
  }
  void reserve(io::File& file, Bytes bytes) override {
    const std::lock_guard lock(mutex_);
    next("reserve");
    kernel_.reserve(file, bytes);
  }
  void sync_file(io::File& file) override {
    const std::lock_guard lock(mutex_);
    next("sync_file");
    if (forgets_) return;
    std::erase_if(written_, [&](const Written& w) { return w.path == file.path(); });
  }
  void sync_folder(const std::string& /*path*/) override {
    const std::lock_guard lock(mutex_);
    next("sync_folder");
    names_.clear();  // a journal holds earlier changes, too
  }
  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    next("rename");
    std::optional<std::string> before;
    if (std::filesystem::is_regular_file(to)) {
      before = grave();
      std::filesystem::copy_file(to, *before);
    }
    kernel_.rename(from, to);
    moved(from, to);
    names_.push_back([this, from, to, before] {
      kernel_.rename(to, from);
      moved(to, from);
      if (before) kernel_.rename(*before, to);
    });
  }
  bool exchange(const std::string& one, const std::string& other) override {
    const std::lock_guard lock(mutex_);
    next("exchange");
    if (!can_exchange_) return false;
    if (!kernel_.exchange(one, other)) return false;
    swapped(one, other);
    names_.push_back([this, one, other] {
      kernel_.exchange(one, other);
      swapped(one, other);
    });
    return true;
  }
  void set_can_exchange(bool can) { can_exchange_ = can; }
  void remove_tree(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    next("remove_tree");
    if (!std::filesystem::exists(std::filesystem::symlink_status(path))) return;
    const std::string buried = grave();
    kernel_.rename(path, buried);
    names_.push_back([this, path, buried] { kernel_.rename(buried, path); });
  }
  void open_to_others(const io::File& file) override { kernel_.open_to_others(file); }

 private:
  struct Written {
    std::string path;
    Bytes offset, bytes;
  };

  void next(const char* what) {
    ++count_;
    if (dead_) throw IoError("no power");
    if (left_ < 0 || left_-- > 0) return;
    if (fault_ == Fault::kPower) {
      dead_ = true;
      throw IoError("the power failed");
    }
    if (fault_ == Fault::kError) throw IoError(std::string(what) + " failed: ENOSPC");
  }
  std::string grave() { return graveyard_ + "/" + std::to_string(graves_++); }

  static bool within(const std::string& path, const std::string& folder) {
    return path == folder || path.starts_with(folder + "/");
  }
  void moved(const std::string& from, const std::string& to) {
    for (Written& w : written_)
      if (within(w.path, from)) w.path = to + w.path.substr(from.size());
  }
  void swapped(const std::string& one, const std::string& other) {
    for (Written& w : written_) {
      if (within(w.path, one)) {
        w.path = other + w.path.substr(one.size());
      } else if (within(w.path, other)) {
        w.path = one + w.path.substr(other.size());
      }
    }
  }
  // Kept, lost, or the first half of it.
  void lose(const Written& written) {
    const auto dice = random_() % 3;
    if (dice == 0 || !std::filesystem::is_regular_file(written.path)) return;
    const Bytes kept = dice == 1 ? Bytes() : written.bytes / 2;
    const io::File file(written.path, io::File::Mode::kReadWrite);
    const std::vector<std::byte> zeroes((written.bytes - kept).size());
    io::write_fully(file, written.offset + kept, zeroes);
  }

  io::FolderCalls kernel_;
  std::mutex mutex_;
  std::mt19937 random_;
  std::string graveyard_;
  int graves_ = 0;
  int count_ = 0;
  int left_ = -1;  // operations before the fault; negative: there is none
  Fault fault_ = Fault::kNone;
  bool dead_ = false;
  bool forgets_ = false;
  bool can_exchange_ = true;
  std::vector<Written> written_;              // not on disk yet
  std::vector<std::function<void()>> names_;  // undo the changes, in their order
};

// Reads and writes the disk's files, short and interrupted now and then as `calls` are.
class CrashingIo final : public io::IoEngine {
 public:
  CrashingIo(CrashingDisk& disk, std::shared_ptr<io::SystemCalls> calls)
      : disk_(disk), engine_({}, std::move(calls)) {}

  std::string_view name() const override { return "crashing"; }
  std::unique_ptr<io::Transfer> read(const io::File& file, Bytes offset,
                                     std::span<std::byte> target) override {
    return engine_.read(file, offset, target);
  }
  std::unique_ptr<io::Transfer> write(const io::File& file, Bytes offset,
                                      std::span<const std::byte> source) override {
    disk_.wrote(file.path(), offset, Bytes(source.size()));
    return engine_.write(file, offset, source);
  }

 private:
  CrashingDisk& disk_;
  io::ThreadEngine engine_;
};

}  // namespace strata::testing
