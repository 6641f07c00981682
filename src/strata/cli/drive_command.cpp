#include "strata/cli/drive_command.h"

#include "strata/cli/byte_size.h"

namespace strata::cli {
namespace {

constexpr int kDepthMax = 1024;

}  // namespace

void add_drive_options(CLI::App& command, DriveOptions& options) {
  command.add_option("PATH", options.paths, "Folders, each on a drive")->required();
  command.add_option("--size", options.size, "Size of the file, as 16GiB; 1GiB, if not given");
  command.add_option("--block", options.blocks, "Sizes of blocks; 256KiB,1MiB,4MiB, if not given")
      ->delimiter(',');
  command.add_option("--depth", options.depths, "Blocks under way; 8,32, if not given")
      ->delimiter(',')
      ->check(CLI::Range(1, kDepthMax));
  command.add_option("--engine", options.engine, "auto, io_uring or threads")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "io_uring", "threads"}));
  command.add_flag("--quick", options.quick, "A file of 256MiB and blocks of 1MiB, if not given");
}

DriveRequest request_of(const DriveOptions& options) {
  DriveRequest request;
  request.paths = options.paths;
  request.engine = io::engine_kind_from(options.engine).value();
  if (options.quick) {
    request.size = 256_MiB;
    request.blocks = {1_MiB};
  }
  if (!options.size.empty()) request.size = parse_byte_size(options.size, "--size");
  if (!options.depths.empty()) request.depths = options.depths;
  if (!options.blocks.empty()) request.blocks.clear();
  for (const std::string& block : options.blocks)
    request.blocks.push_back(parse_byte_size(block, "--block"));
  return request;
}

}  // namespace strata::cli
