#include "strata/comm/host/control_block.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>

#include "strata/base/dtype.h"

namespace strata::comm {

bool same_operation(const OperationEntry& a, const OperationEntry& b) {
  return a.kind == b.kind && a.detail == b.detail && a.count == b.count && a.tag_hash == b.tag_hash;
}

std::string describe(const OperationEntry& entry) {
  constexpr std::array<std::string_view, 3> kOps = {"sum", "min", "max"};
  const std::string tag(entry.tag.begin(), std::find(entry.tag.begin(), entry.tag.end(), '\0'));
  switch (entry.kind) {
    case OperationKind::kReduceScatter:
      return fmt::format("reduce_scatter of '{}' ({} elements of {} a rank)", tag, entry.count,
                         name_of(static_cast<DType>(entry.detail)));
    case OperationKind::kAllReduce:
      return fmt::format("all_reduce of {} values ({})", entry.count,
                         kOps[std::min<std::size_t>(entry.detail, kOps.size() - 1)]);
    case OperationKind::kBroadcast:
      return fmt::format("broadcast of {} bytes from rank {}", entry.count, entry.detail);
    case OperationKind::kText:
      return "all_gather_text";
    case OperationKind::kBarrier:
      return "barrier";
  }
  return "unknown operation";
}

void set_tag(OperationEntry& entry, std::string_view tag) {
  entry.tag_hash = id_of(tag);
  entry.tag = {};
  std::copy_n(tag.begin(), std::min(tag.size(), kTagChars), entry.tag.begin());
}

std::uint64_t id_of(std::string_view name) {
  return std::max<std::uint64_t>(XXH3_64bits(name.data(), name.size()), 1);
}

}  // namespace strata::comm
