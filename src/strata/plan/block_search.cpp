#include "strata/plan/block_search.h"

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

std::vector<bool> named_candidates(const ModuleTree& tree, const std::vector<std::string>& wrap) {
  std::set<std::string> known;
  for (const ModuleNode& node : tree) known.insert(node.class_name);
  for (const std::string& name : wrap) {
    if (known.contains(name)) continue;
    throw ConfigError(fmt::format(
        "wrap names the class '{}', which the model does not contain; its classes are: {}", name,
        fmt::join(known, ", ")));
  }
  std::vector<bool> result(tree.size());
  for (std::size_t i = 0; i < tree.size(); ++i) {
    result[i] = std::find(wrap.begin(), wrap.end(), tree[i].class_name) != wrap.end();
  }
  return result;
}

std::vector<bool> repeated_candidates(const ModuleTree& tree, const Facts& facts) {
  std::map<std::pair<int, std::string>, int> siblings;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    if (facts.has_params[i] && facts.has_children[i] && tree[i].callable) {
      ++siblings[{tree[i].parent, tree[i].class_name}];
    }
  }
  std::vector<bool> result(tree.size());
  for (std::size_t i = 0; i < tree.size(); ++i) {
    if (!facts.has_params[i] || !facts.has_children[i] || !tree[i].callable) continue;
    // Two encoders of one class below a model are towers, not blocks: blocks stand in a container.
    const bool in_container =
        tree[i].parent >= 0 &&
        (!tree[static_cast<std::size_t>(tree[i].parent)].callable ||
         tree[static_cast<std::size_t>(tree[i].parent)].class_name == "Sequential");
    result[i] = in_container && siblings[{tree[i].parent, tree[i].class_name}] >= 2;
  }
  return result;
}

}  // namespace

std::vector<int> find_blocks(const ModuleTree& tree, const std::vector<std::string>& wrap,
                             const std::vector<std::string>& leaf_classes) {
  const Facts facts = gather_facts(tree);
  const std::vector<bool> candidate =
      wrap.empty() ? repeated_candidates(tree, facts) : named_candidates(tree, wrap);
  std::vector<bool> inside(tree.size());
  std::vector<int> blocks;
  for (std::size_t i = 0; i < tree.size(); ++i) {
    const int parent = tree[i].parent;
    inside[i] = parent >= 0 && inside[static_cast<std::size_t>(parent)];
    const bool leaf = std::find(leaf_classes.begin(), leaf_classes.end(), tree[i].class_name) !=
                      leaf_classes.end();
    if (inside[i] || !(candidate[i] || leaf) || !facts.has_params[i]) continue;
    inside[i] = true;
    blocks.push_back(static_cast<int>(i));
  }
  return blocks;
}

}  // namespace strata::plan
