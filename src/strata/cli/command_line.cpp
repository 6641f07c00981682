#include <fcntl.h>
#include <fmt/core.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <system_error>

#include "strata/base/error.h"
#include "strata/cli/commands.h"

namespace strata::cli {
namespace {

// Bytes of names that are not UTF-8 are replaced.
constexpr auto kReplaceBytes = nlohmann::json::error_handler_t::replace;
constexpr int kWorldMax = 1'000'000;
constexpr int kDepthMax = 1024;
constexpr int kRankMax = 65'536;

const std::map<std::string, io::EngineKind> kEngines{{"auto", io::EngineKind::kAuto},
                                                     {"io_uring", io::EngineKind::kUring},
                                                     {"threads", io::EngineKind::kThreads}};

// STRATA_PYTHON if it is set, else the Python that was installed beside this program, or beside the
// link by which it was called, else python3 of PATH.
std::string find_python() {
  if (const char* const named = std::getenv("STRATA_PYTHON"); named != nullptr) return named;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  // The path by which it was called: perhaps a link in a virtual environment.
  const auto* const called = reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
  for (const std::filesystem::path& path :
       {program, std::filesystem::path(called == nullptr ? "" : called)}) {
    const std::filesystem::path beside = path.parent_path() / "python";
    if (path.has_parent_path() && std::filesystem::exists(beside, error)) return beside.string();
  }
  return "python3";
}

// Replaces this process by `python arguments...`, with the Python that has the package: for
// commands that need torch's own reader, and those that start Python programs.
[[noreturn]] void become_python(std::vector<std::string> arguments) {
  const std::string python = find_python();
  arguments.insert(arguments.begin(), python);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  ::execvp(python.c_str(), argv.data());
  const int code = errno;
  throw Error("cannot run '{}'; set STRATA_PYTHON to a Python that has the package strata: {}",
              python, errno_text(code));
}

// Whether the Python has the part of `strata doctor` that shows its packages.
bool has_doctor(const std::string& python) {
  return run_forked([&] {
           const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
           ::dup2(nowhere, STDOUT_FILENO);
           ::dup2(nowhere, STDERR_FILENO);
           return ::execlp(python.c_str(), python.c_str(), "-c", "import strata.doctor", nullptr);
         }) == 0;
}

struct DoctorOptions : MachineRequest {
  int ranks = 0;
};

class CommandLine {
 public:
  explicit CommandLine(Console& console) : console_(console) {
    app_.require_subcommand(1);
    app_.get_formatter()->column_width(30);
    app_.footer(
        "Exit codes: 0 done, 1 found wrong, 2 usage. Every command has --help with examples, "
        "and\n--json for programs.");
    app_.set_version_flag("--version", STRATA_VERSION);
    add_inspect();
    add_consolidate();
    add_diff();
    add_check();
    add_plan();
    add_bench_io();
    add_doctor();
    add_python("run", "Run a training script on ranks, unchanged, with Strata in DeepSpeed's place",
               "`strata run --help` shows the options.\n\nExamples:\n  strata run train.py "
               "--deepspeed ds.json\n  strata run --num_gpus 2 train.py\n",
               {"strata.compat.launcher"});
    add_python("import-deepspeed", "Write a checkpoint of DeepSpeed as one of Strata",
               "CKPT is a folder of tags, or of one tag. `strata import-deepspeed --help` shows "
               "more.\n\nExample:\n  strata import-deepspeed runs/deepspeed runs/strata\n",
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
      return app_.exit(error, console_.out, console_.err) == 0 ? kDone : kUsage;
    }
    const Report report = command_();
    console_.out << (json_ ? report.json.dump(2, ' ', false, kReplaceBytes) + "\n" : report.text);
    return report.right ? kDone : kFoundWrong;
  }

 private:
  // A command that `run` carries out with its options, which the caller binds.
  template <typename Options>
  std::pair<CLI::App&, Options&> add(const char* name, const char* what, const char* examples,
                                     std::function<Report(Options&)> run) {
    CLI::App& command = *app_.add_subcommand(name, what);
    const auto options = std::make_shared<Options>();
    command.footer(examples);
    command.add_flag("--json", json_, "The report as JSON");
    command.callback([this, options, run = std::move(run)] {
      command_ = [options, run] { return run(*options); };
    });
    return {command, *options};
  }

  // An option of which `read` makes a field of the request. That keeps its value where the command
  // line does not say the option.
  template <typename Read>
  static CLI::Option* add_text(CLI::App& command, const char* name, const char* what, Read read) {
    return command.add_option_function<std::string>(name, std::move(read), what);
  }
  template <typename Size>
  static CLI::Option* add_size(CLI::App& command, const char* name, Size& size, const char* what) {
    return add_text(command, name, what,
                    [name, &size](const std::string& text) { size = parse_byte_size(text, name); });
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
      command_ = [&command, module]() -> Report {
        std::vector<std::string> arguments{"-m"};
        for (const auto& more : {module, command.remaining()})
          arguments.insert(arguments.end(), more.begin(), more.end());
        become_python(std::move(arguments));
      };
    });
  }

  void add_inspect() {
    const auto [command, o] = add<InspectRequest>(
        "inspect", "Show what is in a training checkpoint, and whether it is whole",
        "Without --verify only names and sizes of files are looked at. With it every byte "
        "is\nread, and each wrong block is named by file, bytes and tensors.\n\nExamples:\n  "
        "strata inspect run/global_step100\n  strata inspect run --verify          the checkpoint "
        "that run/latest names\n  strata inspect run --json | jq .tags",
        [this](InspectRequest& request) { return inspect(request, console_); });
    command.add_option("CKPT", o.path, "A checkpoint's folder, or a folder of checkpoints")
        ->required();
    command.add_flag("--verify", o.verify, "Read everything and compare checksums");
  }

  void add_consolidate() {
    const auto [command, o] = add<ConsolidationRequest>(
        "consolidate", "Turn a training checkpoint into a Hugging Face folder",
        "Writes the trained weights as safetensors that transformers loads, each tensor once, "
        "in\n256 MiB of memory whatever the model's size. Checksums are compared on the way; what "
        "OUT\nheld before stays until everything is written.\n\nExamples:\n  strata consolidate "
        "run merged                      in the dtypes that were trained\n  strata consolidate "
        "run/global_step100 merged --dtype bf16\n  strata consolidate run merged --dtype fp32 "
        "--max-shard 2GB",
        [this](ConsolidationRequest& request) {
          return consolidate(request, std::make_shared<memory::Ledger>(), console_);
        });
    command.add_option("CKPT", o.path, "A checkpoint's folder, or a folder of checkpoints")
        ->required();
    command.add_option("OUT", o.out, "The folder that is written")->required();
    add_text(command, "--dtype", "bf16, fp16, fp32 or as-trained",
             [&dtype = o.dtype](const std::string& name) {
               dtype = dtype_from_config(name);
               if (dtype || name == "as-trained") return;
               throw UsageError("--dtype: wanted bf16, fp16, fp32 or as-trained; found '{}'", name);
             })
        ->default_str("as-trained");
    add_size(command, "--max-shard", o.shard_max, "Largest file, as 5GB")->default_str("5GB");
    command.add_flag_callback(
        "--no-verify", [&verify = o.verify] { verify = false; }, "Do not compare checksums");
  }

  void add_diff() {
    const auto [command, o] = add<ComparisonRequest>(
        "diff", "Compare two checkpoints: names, shapes, dtypes and values",
        "A and B are training checkpoints, Hugging Face folders or .safetensors files. Masters\nof "
        "a training checkpoint are rounded to the dtype of the folder that they are "
        "compared\nwith. Exit code 0: equal; 1: different.\n\nExamples:\n  strata diff "
        "run/global_step100 run/global_step200 --top 5\n  strata diff run/global_step100 "
        "other/global_step100 --kinds   moments, too\n  strata diff run merged",
        [this](ComparisonRequest& request) { return compare(request, console_); });
    command.add_option("A", o.a, "A checkpoint")->required();
    command.add_option("B", o.b, "Another one")->required();
    command.add_option("--top", o.top, "List this number of tensors that differ most")
        ->capture_default_str();
    command.add_flag("--kinds", o.kinds, "Compare optimizer states, too");
  }

  void add_check() {
    const auto [command, o] = add<CheckRequest>(
        "check", "Say what becomes of each key of a configuration, and mend it",
        "Every key is honoured, a hint without effect, an old spelling, or refused, with the "
        "reason.\nExit code 1: initialize refuses the configuration.\n\nExamples:\n  strata check "
        "ds.json\n  strata check ds.json --fix mended.json\n  strata check ds.json --json | jq "
        "'.keys[] | select(.verdict == \"hint\")'",
        [](CheckRequest& request) { return check_config(request); });
    command.add_option("CONFIG", o.config, "DeepSpeed JSON, a file")
        ->required()
        ->check(CLI::ExistingFile);
    command.add_option("--fix", o.fix, "Write it so that initialize takes it, to this file");
  }

  void add_plan() {
    const auto [command, o] = add<PlanRequest>(
        "plan", "Say what each device will hold, at every stage, before there is one",
        "Runs the engine without memory on the names and shapes of a model: of its safetensors, of "
        "its\nconfig.json alone, or of a well-known one by its name. Without a configuration, or "
        "with --grid,\nit compares stages and placements. Exit code 1: nothing, or not the "
        "configuration's stage, fits\nthe memory or space that was named.\n\nExamples:\n  strata "
        "plan --config ds.json --model Qwen3-8B --world 8 --device-memory 80GiB\n  strata plan "
        "--config ds.json --model path/to/model --world 64 --ranks-per-host 8\n  strata plan "
        "--model Llama-3.1-70B --world 8 --device-memory 80GB --host-memory 1TB \\\n      --seq "
        "4096 --micro-batch 1 --checkpointing --write ds.json\n  strata plan --model config.json "
        "--world 1 --device-memory 24GiB --lora-rank 16 --seq 2048\n  strata plan --model Qwen3-8B "
        "--world 8 --device-memory 80GB --checkpointing   the longest sequence",
        [](PlanRequest& request) { return make_plan(request); });
    command.add_option("--config", o.config, "DeepSpeed JSON, a file; else bf16 and AdamW")
        ->check(CLI::ExistingFile);
    command
        .add_option("--model", o.model,
                    "A Hugging Face folder, a config.json, or a name such as Qwen3-8B")
        ->required();
    command.add_option("--world", o.job.world_size, "Ranks of the job")
        ->required()
        ->check(CLI::Range(1, kWorldMax));
    command
        .add_option("--ranks-per-host", o.job.ranks_per_host, "Ranks of a host; all, if not given")
        ->check(CLI::Range(1, kWorldMax));
    add_size(command, "--device-memory", o.device_memory, "Memory of a device, as 80GiB");
    add_size(command, "--host-memory", o.host_memory, "Memory of a host for its ranks, as 512GiB");
    add_size(command, "--nvme-space", o.nvme_space, "Space of its drive, as 4TB");
    add_text(command, "--device", "cuda or cpu",
             [&on_gpus = o.job.on_gpus](const std::string& device) { on_gpus = device == "cuda"; })
        ->default_str("cuda")
        ->check(CLI::IsMember({"cuda", "cpu"}));
    command.add_option("--lora-rank", o.trained.lora_rank, "Train adapters of this rank alone")
        ->check(CLI::Range(1, kRankMax));
    command.add_option("--frozen", o.trained.frozen,
                       "Do not train parameters: a regular expression");
    command.add_option("--seq", o.seq, "Tokens of a sample: estimates activations, too")
        ->check(CLI::Range(std::int64_t{1}, kSeqMax));
    command.add_option("--micro-batch", o.micro_batch, "Samples of a micro-batch")
        ->check(CLI::Range(std::int64_t{1}, kSeqMax));
    command.add_flag("--checkpointing", o.checkpointing,
                     "The script checkpoints activations; with --device-memory: says the longest "
                     "sequence that fits");
    command.add_flag("--grid", o.grid, "Compare stages and placements");
    command.add_option("--write", o.write, "Write the fastest of the grid that fits to this file");
    command.add_option("--nvme-path", o.nvme_path, "Its folder on a drive")->capture_default_str();
    command.add_flag("--shapes", o.shapes, "List the parameters");
  }

  void add_bench_io() {
    const auto [command, o] = add<DriveRequest>(
        "bench-io", "Measure how fast drives are read and written, for offloading",
        "Makes a file in each folder, which is gone at the end, reads and writes it past the "
        "page\ncache with blocks of several sizes and queues of several depths, and says what to "
        "write\ninto the configuration.\n\nExamples:\n  strata bench-io /mnt/nvme\n  strata "
        "bench-io /mnt/nvme0 /mnt/nvme1 --size 16GiB\n  strata bench-io /mnt/nvme --block "
        "1MiB,8MiB --depth 32,128\n  strata bench-io /mnt/nvme --quick --json | jq .aio",
        [this](DriveRequest& request) { return measure_drives(request, console_); });
    command.add_option("PATH", o.paths, "Folders, each on a drive")->required();
    // The options that follow are read after it, and go before its sizes.
    command.add_flag_callback(
        "--quick",
        [&size = o.size, &blocks = o.blocks] {
          size = 256_MiB;
          blocks = {1_MiB};
        },
        "A file of 256MiB and blocks of 1MiB, if not given");
    add_size(command, "--size", o.size, "Size of the file, as 16GiB; 1GiB, if not given");
    command
        .add_option_function<std::vector<std::string>>(
            "--block",
            [&blocks = o.blocks](const std::vector<std::string>& texts) {
              blocks.clear();
              for (const std::string& text : texts)
                blocks.push_back(parse_byte_size(text, "--block"));
            },
            "Sizes of blocks; 256KiB,1MiB,4MiB, if not given")
        ->delimiter(',');
    command.add_option("--depth", o.depths, "Blocks under way; 8,32, if not given")
        ->delimiter(',')
        ->check(CLI::Range(1, kDepthMax));
    add_text(command, "--engine", "auto, io_uring or threads",
             [&engine = o.engine](const std::string& name) { engine = kEngines.at(name); })
        ->default_str("auto")
        ->check(CLI::IsMember(kEngines));
  }

  void add_doctor() {
    const auto [command, o] = add<DoctorOptions>(
        "doctor", "Say what is installed here, whether it fits together, and what is wrong",
        "Shows the machine first, then Python's packages. A fact is one line; a PROBLEM says what "
        "to\ndo. Exit code 1: there is a problem.\n\nExamples:\n  strata doctor\n  strata doctor "
        "/mnt/nvme --config ds.json       drives, too\n  strata doctor --ranks 2                   "
        "   ranks exchange values and train a step\n  strata doctor --json | jq .problems",
        [this](DoctorOptions& given) { return examine(given); });
    command.add_option("PATH", o.folders, "Folders on drives for offloading");
    command.add_option("--config", o.config, "DeepSpeed JSON, a file, whose drives are looked at")
        ->check(CLI::ExistingFile);
    command.add_option("--ranks", o.ranks, "Ranks to try on this host")
        ->check(CLI::Range(1, kDepthMax));
  }

  // Shows the machine and becomes the Python that shows its packages, if that has ours.
  Report examine(const DoctorOptions& given) {
    Report report = look_at_machine(given);
    const std::string python = find_python();
    if (!has_doctor(python)) {
      add_problem(report, fmt::format("this Python cannot import the package strata; run {} -m pip "
                                      "install strata-train, or set STRATA_PYTHON to a Python that "
                                      "has it",
                                      python));
      return report;
    }
    if (!json_) console_.out << report.text << std::flush;
    std::vector<std::string> arguments{"-m", "strata.doctor", "--machine",
                                       report.json.dump(-1, ' ', false, kReplaceBytes),
                                       fmt::format("--ranks={}", given.ranks)};
    if (json_) arguments.emplace_back("--json");
    become_python(std::move(arguments));
  }

  CLI::App app_{"strata: training checkpoints and memory, on the command line", "strata"};
  Console& console_;
  bool json_ = false;
  std::function<Report()> command_;
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
