#include "strata/cli/command_line.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/cli/byte_size.h"
#include "strata/cli/comparison.h"
#include "strata/cli/config_check.h"
#include "strata/cli/consolidation.h"
#include "strata/cli/drive_command.h"
#include "strata/cli/inspection.h"
#include "strata/cli/memory_plan.h"
#include "strata/cli/python_module.h"
#include "strata/io/thread_engine.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

// The state that all commands share.
struct Session {
  Console& console;
  bool json = false;
  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();

  // Bytes of names that are not UTF-8 are replaced.
  void show(const std::string& text, const Json& as_json) const {
    console.out << (json ? as_json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                         : text);
  }
};

using Command = std::function<ExitCode()>;

class CommandLine {
 public:
  explicit CommandLine(Console& console) : session_{console} {
    app_.require_subcommand(1);
    app_.get_formatter()->column_width(30);
    app_.footer(
        "Exit codes: 0 done, 1 found wrong, 2 usage. Every command has --help with examples, and\n"
        "--json for programs.");
    app_.set_version_flag("--version", STRATA_VERSION);
    add_inspect();
    add_consolidate();
    add_diff();
    add_check();
    add_plan();
    add_bench_io();
    add_python("run", "Run a training script on ranks, unchanged, with Strata in DeepSpeed's place",
               "`strata run --help` shows the options.\n\n"
               "Examples:\n  strata run train.py --deepspeed ds.json\n"
               "  strata run --num_gpus 2 train.py\n",
               {"strata.compat.launcher"});
    add_python(
        "import-deepspeed", "Write a checkpoint of DeepSpeed as one of Strata",
        "CKPT is a folder of tags, or of one tag. `strata import-deepspeed --help` shows more.\n\n"
        "Example:\n  strata import-deepspeed runs/deepspeed runs/strata\n",
        {"strata.importing", "deepspeed"});
    add_python("import-dcp", "Write a folder of torch.distributed.checkpoint as one of Strata",
               "Example:\n  strata import-dcp runs/fsdp2 runs/strata\n",
               {"strata.importing", "dcp"});
    add_python("export-deepspeed", "Write a checkpoint of Strata as one of DeepSpeed",
               "Example:\n  strata export-deepspeed runs/strata runs/deepspeed\n",
               {"strata.exporting", "deepspeed"});
  }

  ExitCode run(std::vector<std::string> arguments) {
    try {
      std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
      app_.parse(arguments);
    } catch (const CLI::ParseError& error) {
      // Help and version are "errors" of code 0.
      const int code = app_.exit(error, session_.console.out, session_.console.err);
      return code == 0 ? kDone : kUsage;
    }
    return command_();
  }

 private:
  CLI::App& add(const char* name, const char* what, const char* examples) {
    CLI::App& command = *app_.add_subcommand(name, what);
    command.footer(examples);
    command.add_flag("--json", session_.json, "The report as JSON");
    return command;
  }

  // A command that is a module of the Python package, which needs torch or starts Python's
  // programs.
  void add_python(const char* name, const char* what, const char* examples,
                  std::vector<std::string> module) {
    CLI::App& command = *app_.add_subcommand(name, what);
    command.footer(examples);
    command.set_help_flag();  // the module shows its own
    command.prefix_command();
    command.final_callback([this, &command, module = std::move(module)] {
      command_ = [&command, module]() -> ExitCode {
        std::vector<std::string> arguments{"-m"};
        arguments.insert(arguments.end(), module.begin(), module.end());
        const std::vector<std::string> given = command.remaining();
        arguments.insert(arguments.end(), given.begin(), given.end());
        become_python(std::move(arguments));
      };
    });
  }

  void add_inspect() {
    CLI::App& command =
        add("inspect", "Show what is in a training checkpoint, and whether it is whole",
            "Without --verify only names and sizes of files are looked at. With it every byte is\n"
            "read, and each wrong block is named by file, bytes and tensors.\n\n"
            "Examples:\n"
            "  strata inspect run/global_step100\n"
            "  strata inspect run --verify          the checkpoint that run/latest names\n"
            "  strata inspect run --json | jq .tags");
    command.add_option("CKPT", path_, "A checkpoint's folder, or a folder of checkpoints")
        ->required();
    command.add_flag("--verify", verify_, "Read everything and compare checksums");
    command.callback([this] { command_ = [this] { return inspect_command(); }; });
  }

  void add_consolidate() {
    CLI::App& command = add(
        "consolidate", "Turn a training checkpoint into a Hugging Face folder",
        "Writes the trained weights as safetensors that transformers loads, each tensor once, in\n"
        "256 MiB of memory whatever the model's size. Checksums are compared on the way; what OUT\n"
        "held before stays until everything is written.\n\n"
        "Examples:\n"
        "  strata consolidate run merged                      in the dtypes that were trained\n"
        "  strata consolidate run/global_step100 merged --dtype bf16\n"
        "  strata consolidate run merged --dtype fp32 --max-shard 2GB");
    command.add_option("CKPT", path_, "A checkpoint's folder, or a folder of checkpoints")
        ->required();
    command.add_option("OUT", other_, "The folder that is written")->required();
    command.add_option("--dtype", dtype_, "bf16, fp16, fp32 or as-trained")->capture_default_str();
    command.add_option("--max-shard", max_shard_, "Largest file, as 5GB")->capture_default_str();
    command.add_flag("--no-verify", no_verify_, "Do not compare checksums");
    command.callback([this] { command_ = [this] { return consolidate_command(); }; });
  }

  void add_diff() {
    CLI::App& command = add(
        "diff", "Compare two checkpoints: names, shapes, dtypes and values",
        "A and B are training checkpoints, Hugging Face folders or .safetensors files. Masters\n"
        "of a training checkpoint are rounded to the dtype of the folder that they are compared\n"
        "with. Exit code 0: equal; 1: different.\n\n"
        "Examples:\n"
        "  strata diff run/global_step100 run/global_step200 --top 5\n"
        "  strata diff run/global_step100 other/global_step100 --kinds   moments, too\n"
        "  strata diff run merged");
    command.add_option("A", path_, "A checkpoint")->required();
    command.add_option("B", other_, "Another one")->required();
    command.add_option("--top", top_, "List this number of tensors that differ most")
        ->capture_default_str();
    command.add_flag("--kinds", kinds_, "Compare optimizer states, too");
    command.callback([this] { command_ = [this] { return diff_command(); }; });
  }

  void add_check() {
    CLI::App& command =
        add("check", "Say what becomes of each key of a configuration, and mend it",
            "Every key is honoured, a hint without effect, an old spelling, or refused, with the "
            "reason.\nExit code 1: initialize refuses the configuration.\n\n"
            "Examples:\n"
            "  strata check ds.json\n"
            "  strata check ds.json --fix mended.json\n"
            "  strata check ds.json --json | jq '.keys[] | select(.verdict == \"hint\")'");
    add_check_options(command, check_);
    command.callback([this] { command_ = [this] { return check_command(); }; });
  }

  void add_plan() {
    CLI::App& command = add(
        "plan", "Say what each device will hold, at every stage, before there is one",
        "Runs the engine without memory on the names and shapes of a model's safetensors. Exit\n"
        "code 1: the configuration's stage does not fit the memory or space that was named.\n\n"
        "Examples:\n"
        "  strata plan --config ds.json --model Qwen3-8B --world 8 --device-memory 80GiB\n"
        "  strata plan --config ds.json --model Qwen3-8B --world 64 --ranks-per-host 8\n"
        "  strata plan --config ds.json --model Qwen3-8B --world 1 --device-memory 24GiB \\\n"
        "      --host-memory 64GiB --nvme-space 1TB");
    command.add_option("--config", config_, "DeepSpeed JSON, a file")
        ->required()
        ->check(CLI::ExistingFile);
    command.add_option("--model", path_, "A Hugging Face folder with safetensors")->required();
    command.add_option("--world", world_, "Ranks of the job")
        ->required()
        ->check(CLI::Range(1, kWorldMax));
    command.add_option("--ranks-per-host", ranks_per_host_, "Ranks of a host; all, if not given")
        ->check(CLI::Range(1, kWorldMax));
    command.add_option("--device-memory", device_memory_, "Memory of a device, as 80GiB");
    command.add_option("--host-memory", host_memory_, "Memory of a host for its ranks, as 512GiB");
    command.add_option("--nvme-space", nvme_space_, "Space of its drive, as 4TB");
    command.add_option("--device", device_, "cuda or cpu")
        ->capture_default_str()
        ->check(CLI::IsMember({"cuda", "cpu"}));
    command.callback([this] { command_ = [this] { return plan_command(); }; });
  }

  void add_bench_io() {
    CLI::App& command = add(
        "bench-io", "Measure how fast drives are read and written, for offloading",
        "Makes a file in each folder, which is gone at the end, reads and writes it past the page\n"
        "cache with blocks of several sizes and queues of several depths, and says what to write\n"
        "into the configuration.\n\n"
        "Examples:\n"
        "  strata bench-io /mnt/nvme\n"
        "  strata bench-io /mnt/nvme0 /mnt/nvme1 --size 16GiB\n"
        "  strata bench-io /mnt/nvme --block 1MiB,8MiB --depth 32,128\n"
        "  strata bench-io /mnt/nvme --quick --json | jq .aio");
    add_drive_options(command, drives_);
    command.callback([this] { command_ = [this] { return bench_io_command(); }; });
  }

  ExitCode check_command() {
    const ConfigCheck result = check_config(check_);
    session_.show(text_of(result), json_of(result));
    return result.review.accepted() ? kDone : kFoundWrong;
  }

  ExitCode bench_io_command() {
    const DriveSpeeds speeds =
        measure_drives(request_of(drives_), session_.ledger, session_.console);
    session_.show(text_of(speeds), json_of(speeds));
    return kDone;
  }

  ExitCode inspect_command() {
    io::ThreadEngine io;
    const Inspection result = inspect(path_, verify_, io, session_.ledger, session_.console);
    session_.show(text_of(result), json_of(result));
    return result.whole() ? kDone : kFoundWrong;
  }

  ExitCode consolidate_command() {
    ConsolidationOptions options;
    options.shard_max = parse_byte_size(max_shard_, "--max-shard");
    options.verify = !no_verify_;
    if (dtype_ != "as-trained") {
      options.dtype = dtype_from_config(dtype_);
      if (!options.dtype) {
        throw UsageError(
            fmt::format("--dtype: wanted bf16, fp16, fp32 or as-trained; found '{}'", dtype_));
      }
    }
    io::ThreadEngine io;
    const Consolidated result =
        consolidate(path_, other_, options, io, session_.ledger, session_.console);
    session_.show(text_of(result), json_of(result));
    return kDone;
  }

  ExitCode diff_command() {
    ComparisonOptions options;
    options.top = top_;
    options.kinds = kinds_;
    const TensorSource a(path_, kinds_);
    const TensorSource b(other_, kinds_);
    io::ThreadEngine io;
    const Comparison result = compare(a, b, options, io, session_.ledger, session_.console);
    session_.show(text_of(result), json_of(result));
    return result.equal() ? kDone : kFoundWrong;
  }

  ExitCode plan_command() {
    PlanRequest request;
    request.config = config_;
    request.model = path_;
    request.job = {world_, device_ == "cuda", ranks_per_host_};
    if (!device_memory_.empty())
      request.device_memory = parse_byte_size(device_memory_, "--device-memory");
    if (!host_memory_.empty()) request.host_memory = parse_byte_size(host_memory_, "--host-memory");
    if (!nvme_space_.empty()) request.nvme_space = parse_byte_size(nvme_space_, "--nvme-space");
    const MemoryPlan plan = make_plan(request);
    session_.show(text_of(plan), json_of(plan));
    return plan.fits_all() ? kDone : kFoundWrong;
  }

  static constexpr int kWorldMax = 1'000'000;

  CLI::App app_{"strata: training checkpoints and memory, on the command line", "strata"};
  Session session_;
  Command command_;
  std::string path_;
  std::string other_;
  std::string dtype_ = "as-trained";
  std::string max_shard_ = "5GB";
  std::string config_;
  std::string device_memory_;
  std::string host_memory_;
  std::string nvme_space_;
  std::string device_ = "cuda";
  DriveOptions drives_;
  CheckRequest check_;
  bool verify_ = false;
  bool no_verify_ = false;
  bool kinds_ = false;
  std::size_t top_ = 20;
  int world_ = 1;
  int ranks_per_host_ = 0;
};

}  // namespace

int run_command_line(const std::vector<std::string>& arguments, Console& console) {
  const auto fail = [&](const std::exception& error, ExitCode code) {
    console.err << "strata: " << error.what() << "\n";
    return code;
  };
  try {
    return CommandLine(console).run(arguments);
  } catch (const UsageError& error) {
    return fail(error, kUsage);
  } catch (const ConfigError& error) {
    return fail(error, kUsage);
  } catch (const std::exception& error) {
    return fail(error, kFoundWrong);
  }
}

}  // namespace strata::cli
