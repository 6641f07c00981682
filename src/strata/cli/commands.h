// The program `strata` and its subcommands: what each of them is asked, and the function that
// carries it out and returns its report. Threads: one, beside those that read and write. Errors of
// every command: IoError for a file that cannot be read or written; the others stand with each.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/checkpoint/reader.h"
#include "strata/cli/console.h"
#include "strata/cli/named_model.h"
#include "strata/device/device.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/io/io_engine.h"
#include "strata/memory/ledger.h"

namespace strata::cli {

// `strata inspect`: the content of a training checkpoint: where it comes from, what was saved of
// how many tensors, in which files, and what is wrong with them: everything that is wrong is found,
// not only the first. Memory: the manifest, and where every byte is read a TransferRing. Errors: of
// folder.h.
struct InspectRequest {
  std::string path;
  bool verify = false;  // read every byte and compare checksums
};
Report inspect(const InspectRequest& request, Console& console);

// One line: the file, the range, what is wrong, and the tensors.
std::string text_of(const format::Manifest& manifest, const checkpoint::WrongRange& wrong);

// `strata consolidate`: turns a training checkpoint into a Hugging Face folder: the values of
// parameters and of persistent buffers, each once, in files that transformers loads. Reads the
// checkpoint's files from front to back, checks every block on the way, casts, and writes each
// piece to where its tensor lies. The former content of OUT stays until all of it is written and
// was what its checksums say. Memory: two rings, whatever the model's size; and the manifest.
// Errors: FormatError of a checkpoint that is damaged (names file, bytes and tensor); UsageError
// for an OUT that is a training checkpoint itself.
struct ConsolidationRequest {
  std::string path;  // as choose_checkpoint() takes it
  std::string out;
  std::optional<DType> dtype = {};  // of floating tensors; absent: in which the model computes
  Bytes shard_max = 5'000'000'000_B;
  bool verify = true;
  checkpoint::RingOptions ring = {8, 4_MiB};  // of each of the two
};
Report consolidate(const ConsolidationRequest& request,
                   const std::shared_ptr<memory::Ledger>& ledger, Console& console);

// `strata diff`: the differences of two checkpoints of either kind: names, shapes, dtypes, and by
// how much values do. Where one is a training checkpoint and the other is not, the fp32 masters of
// the one are rounded to the dtype that the other has, which says nothing of dtypes then: so a
// checkpoint equals what was consolidated from it. Memory: a ring, two pieces in fp64, and a list
// of the pieces, each of some MiB. Errors: of TensorSource; UsageError where optimizer states are
// asked for that one of them cannot have.
struct ComparisonRequest {
  std::string a;
  std::string b;
  std::size_t top = 20;  // the most tensors that are listed
  bool kinds = false;    // also what optimizers keep
};
Report compare(const ComparisonRequest& request, Console& console);

// `strata check`: the treatment of each key of a DeepSpeed configuration, and the same
// configuration rewritten so that initialize() accepts it. Errors: ConfigError for a file that is
// no configuration.
struct CheckRequest {
  std::string config;  // path
  std::string fix;     // where to write the rewritten one; empty: nowhere
};
Report check_config(const CheckRequest& request);

// `strata plan`: the memory that each device of a job would hold at every stage, its host and its
// drive, and which of them suffice; or a grid of stages and placements, of which one that fits is
// written as a configuration. The engine itself computes it, run on a device without memory
// (forecast/); the model comes from its files, or from its configuration alone (named_model.h).
// Only activations are estimated, and by them the longest rows that fit (activations.h). Errors:
// ConfigError for a configuration that is wrong, or does not suit this number of ranks at its own
// stage; those of read_model().
struct PlanRequest {
  std::string config;  // path, or JSON text; empty: bf16, and the grid
  std::string model;   // as read_model() takes it
  TrainedPart trained;
  forecast::Job job;
  std::optional<Bytes> device_memory;
  std::optional<Bytes> host_memory;       // of a host, whose ranks share it
  std::optional<Bytes> nvme_space;        // likewise
  std::int64_t seq = 0;                   // tokens of a sample; above 0: activations are estimated
  std::int64_t micro_batch = 0;           // 0: the configuration's, or 1
  bool checkpointing = false;             // of activations; with device_memory: longest rows
  bool grid = false;                      // of stages and placements
  bool shapes = false;                    // list the parameters
  std::string write;                      // a file for the first of the grid that fits
  std::string nvme_path = "/local_nvme";  // where the configuration names none
};
Report make_plan(const PlanRequest& request);

// A tier that the ranks of a host share.
struct SharedTier {
  memory::Tier tier;
  const char* key;       // in JSON: what it holds
  const char* fits_key;  // and whether that fits
  const char* label;     // of rows
  const char* noun;
  std::optional<Bytes> PlanRequest::*room;
};

inline constexpr std::array<SharedTier, 2> kSharedTiers{
    {{memory::Tier::kHost, "host", "host_fits", "host", "the host", &PlanRequest::host_memory},
     {memory::Tier::kNvme, "nvme", "nvme_fits", "NVMe", "the drive", &PlanRequest::nvme_space}}};

// Calls use(kind, name) for every kind.
template <typename Use>
void for_each_kind(const Use& use) {
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    use(kind, std::string(name_of(kind)));
  }
}

inline bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // memory of kernels is not planned
}

// Whatever was asked fits.
inline bool fits_all(const nlohmann::json& stage) {
  return stage["fits"] != false && stage["host_fits"] != false && stage["nvme_fits"] != false;
}

// The report of `strata plan` for people, out of that for programs. Pure.
std::string text_of_plan(const PlanRequest& request, const nlohmann::json& plan);

// `strata bench-io`: how fast drives are read and written past the page cache: a file in each
// folder, read, written, and both at once, with blocks of several sizes and queues of several
// depths, from front to back, into and out of registered memory; and what to write into the
// configuration. Memory: two blocks for each place of the deepest queue. The files have no names,
// so that they are gone when they are closed, even if the process is killed. Errors: UsageError for
// a folder that is missing, not writable or too full, and for sizes that do not go together.
struct DriveRequest {
  std::vector<std::string> paths;
  Bytes size = 1_GiB;  // of the file; each pass moves as much
  std::vector<Bytes> blocks{256_KiB, 1_MiB, 4_MiB};
  std::vector<int> depths{8, 32};
  io::EngineKind engine = io::EngineKind::kAuto;
};
Report measure_drives(const DriveRequest& request, Console& console);

// GB/s with one size of blocks and one depth.
struct DriveFigures {
  Bytes block;
  int depth = 0;
  double read = 0;
  double write = 0;
  double both = 0;  // together, half of the bytes each
};

// The figures of each drive.
using DriveSpeeds = std::vector<std::vector<DriveFigures>>;

// Which figures to take, of drives that have all been measured alike: those by which a byte is read
// and written soonest on the drive that loses most; and of those that are about as good, the ones
// that hold least memory.
std::size_t best_of(const DriveSpeeds& drives);

// The first part of `strata doctor`: limits of this machine, shared memory, io_uring, reads between
// ranks, drives, GPUs; seen without Python. A problem stops jobs, a note makes them slower; both
// say what to do. One thread, which forks. Errors: ConfigError for a wrong configuration.
struct MachineRequest {
  std::vector<std::string> folders;  // on drives for offloading
  std::string config;                // a file whose drives are looked at, too; empty: none
  std::filesystem::path root = "/";  // holds dev/, proc/ and sys/; another one in tests
};
// JSON: "facts", {name: {"text": ..., and numbers}}; "problems" and "notes", texts; "right".
Report look_at_machine(const MachineRequest& request);
void add_problem(Report& report, const std::string& text);

// Runs a kernel; returns why its result is wrong, or nothing.
std::string try_kernel(device::Device& device);

// Runs `work` in a process of its own; returns its exit code, and 255 for any other end.
int run_forked(const std::function<int()>& work);

enum ExitCode : int {
  kDone = 0,
  kFoundWrong = 1,  // damaged, different, does not fit; or the machine failed
  kUsage = 2,       // the command line, or what it names, cannot be meant
};

// Reads a command line, runs the one command that it names, and writes its report to `out`, errors
// and progress to `err`. `arguments` without the program's name. Errors: none leave; they are
// messages and exit codes.
int run_command_line(const std::vector<std::string>& arguments, Console& console);

}  // namespace strata::cli
