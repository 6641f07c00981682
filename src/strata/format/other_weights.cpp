#include "strata/format/other_weights.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include "strata/base/error.h"
#include "strata/format/shard_plan.h"
#include "strata/io/atomic_file.h"

namespace strata::format {
namespace {

constexpr std::string_view kIndexEnding = ".index.json";

}  // namespace

bool is_weights_name(std::string_view name) {
  name = io::AtomicFile::target_of(name);
  if (is_shard_name(name)) return true;
  if (name.ends_with(kIndexEnding)) name.remove_suffix(kIndexEnding.size());
  return name == kSingleFileName || name == kSinglePickleName;
}

void remove_other_weights(const std::string& folder, const std::set<std::string>& ours) {
  std::vector<std::string> others;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (is_weights_name(name) && !ours.contains(name)) others.push_back(name);
  }
  if (error) {
    throw IoError(
        fmt::format("cannot list a folder: path={} {}", folder, errno_text(error.value())));
  }
  std::partition(others.begin(), others.end(),
                 [](const std::string& n) { return n.ends_with(kIndexEnding); });
  for (const std::string& name : others) io::remove_file(folder + "/" + name);
}

}  // namespace strata::format
