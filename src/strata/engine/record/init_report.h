// The start-up of one rank: its phases with seconds and bytes, and the most memory that was in use.
// Code that runs a phase opens it here. Users see the report as a table and as init_report.json.
// Threads: one thread at a time. Units: seconds, bytes. Errors: none of its own.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/checkpoint/reader.h"
#include "strata/device/device.h"

namespace strata::engine {

struct InitPhase {
  std::string name;  // "read", "all-gather", ...
  double seconds = 0.0;
  Bytes bytes;  // that this rank moved
};

class InitReport {
 public:
  // Called some times a second with the bytes that a phase has moved so far, and with its total.
  using Progress = std::function<void(const std::string& phase, Bytes done, Bytes total)>;

  Progress progress;  // may be empty
  // The way in which the values came, and why.
  std::string tier;
  std::string reason;
  // How the files were read; absent: none were.
  std::optional<checkpoint::ReadChoice> reading;

  // Borrows the device, whose memory is watched.
  explicit InitReport(device::Device& device);

  // A phase lasts until its end() or its destruction.
  class Phase : NonCopyable {
   public:
    Phase(InitReport& report, std::string name, Bytes total);
    ~Phase() { end(); }
    void moved(Bytes bytes);
    void end();

   private:
    InitReport& report_;
    std::string name_;
    Bytes total_;
    Bytes done_;
    std::chrono::steady_clock::time_point start_;
    bool open_ = true;
  };

  // Updates the peaks; phases call it as they run.
  void sample();
  // In the order of their ends; phases of one name are one entry.
  const std::vector<InitPhase>& phases() const { return phases_; }
  // The growth of the device's memory in use from the report's beginning to its peak, by the
  // system's own count; use by other programs is included.
  Bytes device_growth() const { return free_at_start_ - least_free_; }

 private:
  void add(const std::string& name, double seconds, Bytes bytes);

  device::Device& device_;
  std::vector<InitPhase> phases_;
  std::chrono::steady_clock::time_point last_look_;
  Bytes free_at_start_;
  Bytes least_free_;
};

}  // namespace strata::engine
