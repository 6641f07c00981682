#include "strata/plan/block_search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "strata/base/error.h"

namespace strata::plan {
namespace {

// For every module: does its subtree own parameters, and does it have children?
struct Facts {
  std::vector<bool> has_params;
  std::vector<bool> has_children;
};

Facts gather_facts(const ModuleTree& tree) {
  Facts facts{std::vector<bool>(tree.size()), std::vector<bool>(tree.size())};
  for (std::size_t i = tree.size(); i-- > 0;) {  // children come after parents
    if (!tree[i].params.empty()) facts.has_params[i] = true;
    if (tree[i].parent < 0) continue;
    const auto parent = static_cast<std::size_t>(tree[i].parent);
    facts.has_children[parent] = true;
    if (facts.has_params[i]) facts.has_params[parent] = true;
  }
  return facts;
}

// "package.module.Class" names the class, too.
bool names_class_of(const std::vector<std::string>& classes, const ModuleNode& node) {
  return std::ranges::any_of(classes, [&](const std::string& name) {
    return std::string_view(name).substr(name.rfind('.') + 1) == node.class_name;
  });
}

// Those of the candidates that own parameters and lie in no other.
std::vector<int> outermost(const ModuleTree& tree, const Facts& facts,
                           const std::vector<bool>& candidate) {
  std::vector<bool> inside(tree.size());
  std::vector<int> result;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    const int parent = tree[i].parent;
    inside[i] = parent >= 0 && inside[static_cast<std::size_t>(parent)];
    if (inside[i] || !candidate[i] || !facts.has_params[i]) continue;
    inside[i] = true;
    result.push_back(static_cast<int>(i));
  }
  return result;
}

std::vector<bool> named_candidates(const ModuleTree& tree, const std::vector<std::string>& wrap) {
  std::set<std::string> known;
  for (const ModuleNode& node : tree) known.insert(node.class_name);
  for (const std::string& name : wrap) {
    if (known.contains(name)) continue;
    throw ConfigError(
        "wrap names the class '{}', which the model does not contain; its classes are: {}", name,
        fmt::join(known, ", "));
  }
  std::vector<bool> result(tree.size());
  for (std::size_t i = 0; i < tree.size(); ++i)
    result[i] = std::ranges::find(wrap, tree[i].class_name) != wrap.end();
  return result;
}

std::vector<bool> repeated_candidates(const ModuleTree& tree, const Facts& facts) {
  std::map<std::pair<int, std::string>, std::vector<std::size_t>> siblings;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    if (facts.has_params[i] && facts.has_children[i] && tree[i].callable)
      siblings[{tree[i].parent, tree[i].class_name}].push_back(i);
  }
  std::vector<bool> result(tree.size());
  for (const auto& [key, members] : siblings) {
    if (key.first < 0 || members.size() < 2) continue;
    // Two encoders of one class below a model are towers, not blocks: blocks stand in a container.
    const ModuleNode& parent = tree[static_cast<std::size_t>(key.first)];
    if (parent.callable && parent.class_name != "Sequential") continue;
    for (const std::size_t member : members) result[member] = true;
  }
  return result;
}

}  // namespace

bool LeafModules::holds(const ModuleNode& node) const {
  const auto ends_path = [&](const std::string& suffix) { return node.path.ends_with(suffix); };
  return node.leaf || names_class_of(classes, node) ||
         std::ranges::find(names, node.path) != names.end() ||
         std::ranges::any_of(name_suffixes, ends_path);
}

std::vector<int> find_blocks(const ModuleTree& tree, const std::vector<std::string>& wrap,
                             const LeafModules& leaves) {
  const Facts facts = gather_facts(tree);
  std::vector<bool> candidate =
      wrap.empty() ? repeated_candidates(tree, facts) : named_candidates(tree, wrap);
  for (std::size_t i = 0; i < tree.size(); ++i) {
    if (leaves.holds(tree[i])) candidate[i] = true;
  }
  return outermost(tree, facts, candidate);
}

std::vector<int> find_named(const ModuleTree& tree, const std::vector<std::string>& classes,
                            const LeafModules& leaves) {
  std::vector<bool> candidate(tree.size());
  for (std::size_t i = 0; i < tree.size(); ++i)
    candidate[i] = names_class_of(classes, tree[i]) || leaves.holds(tree[i]);
  return outermost(tree, gather_facts(tree), candidate);
}

}  // namespace strata::plan
