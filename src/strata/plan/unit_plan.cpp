#include "strata/plan/unit_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "strata/base/error.h"
#include "strata/plan/block_search.h"

namespace strata::plan {
namespace {

using Key = std::tuple<DType, bool, bool>;  // dtype, trainable, persistent

class Planner {
 public:
  Planner(std::span<const ParamSpec> params, const ModuleTree& tree, const PlanOptions& options)
      : params_(params), tree_(tree), options_(options) {
    plan_.unit_of_param.assign(params.size(), -1);
    choose_persistent();
  }

  ModelPlan run() {
    block_of_module_.assign(tree_.size(), -1);
    for (const int block : find_blocks(tree_, options_.wrap)) {
      block_of_module_[static_cast<std::size_t>(block)] = block;
    }
    for (std::size_t i = 0; i < tree_.size(); ++i) {
      const int parent = tree_[i].parent;
      if (block_of_module_[i] < 0 && parent >= 0) {
        block_of_module_[i] = block_of_module_[static_cast<std::size_t>(parent)];
      }
    }
    for (std::size_t i = 0; i < tree_.size(); ++i) visit(static_cast<int>(i));
    make_scopes();
    return std::move(plan_);
  }

 private:
  void choose_persistent() {
    persistent_.assign(params_.size(), false);
    Numel total;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const Numel n = params_[i].numel();
      if (n > options_.persistence_threshold || options_.persistence_threshold.value == 0) continue;
      if (options_.persistence_total.value > 0 && total + n > options_.persistence_total) continue;
      persistent_[i] = true;
      total += n;
    }
  }

  Key key_of(int param) const {
    const ParamSpec& spec = params_[static_cast<std::size_t>(param)];
    return {spec.dtype, spec.trainable, persistent_[static_cast<std::size_t>(param)]};
  }

  // Blocks are planned whole when their own module is reached; other modules by their own
  // parameters.
  void visit(int module) {
    const int block = block_of_module_[static_cast<std::size_t>(module)];
    if (block == module) {
      std::vector<int> params;
      for (std::size_t i = static_cast<std::size_t>(module); i < tree_.size(); ++i) {
        if (block_of_module_[i] == block) take(tree_[i].params, params);
      }
      open_.clear();
      add_block(tree_[static_cast<std::size_t>(module)].path, params);
    } else if (block < 0) {
      std::vector<int> params;
      take(tree_[static_cast<std::size_t>(module)].params, params);
      for (const int param : params) add_loose(module, param);
    }
  }

  // Appends those parameters that no unit has yet (a tied one is met several times).
  void take(const std::vector<int>& from, std::vector<int>& to) {
    for (const int param : from) {
      if (!taken_.insert(param).second) continue;
      to.push_back(param);
    }
  }

  void add_block(const std::string& path, const std::vector<int>& params) {
    std::map<Key, int> units;
    for (const int param : params) {
      const Key key = key_of(param);
      const auto [it, fresh] = units.try_emplace(key, -1);
      if (fresh) it->second = new_unit(path, key, units.size() > 1);
      put(it->second, param);
    }
  }

  void add_loose(int module, int param) {
    const Key key = key_of(param);
    const Bytes bytes =
        bytes_of(params_[static_cast<std::size_t>(param)].numel(), std::get<0>(key));
    auto it = open_.find(key);
    if (it == open_.end() || it->second.bytes + bytes > options_.unit_bytes) {
      const std::string& path = tree_[static_cast<std::size_t>(module)].path;
      it =
          open_
              .insert_or_assign(
                  key, Open{new_unit(path.empty() ? "(root)" : path, key, !open_.empty()), Bytes()})
              .first;
    }
    put(it->second.unit, param);
    it->second.bytes += bytes;
  }

  int new_unit(const std::string& name, const Key& key, bool with_suffix) {
    const auto& [dtype, trainable, persistent] = key;
    std::string suffix;
    if (with_suffix) {
      suffix = fmt::format(":{}{}{}", name_of(dtype), trainable ? "" : ":frozen",
                           persistent ? ":persistent" : "");
    }
    plan_.units.push_back({name + suffix, {}, dtype, trainable, persistent});
    return static_cast<int>(plan_.units.size()) - 1;
  }

  void put(int unit, int param) {
    plan_.units[static_cast<std::size_t>(unit)].params.push_back(param);
    plan_.unit_of_param[static_cast<std::size_t>(param)] = unit;
  }

  // A block's scope covers its whole subtree; another module's scope its own parameters.
  void make_scopes() {
    std::map<int, std::set<int>> units_of_module;
    for (std::size_t i = 0; i < tree_.size(); ++i) {
      const int block = block_of_module_[i];
      const int scope = block >= 0 ? block : static_cast<int>(i);
      for (const int param : tree_[i].params) {
        units_of_module[scope].insert(plan_.unit_of_param[static_cast<std::size_t>(param)]);
      }
    }
    for (const auto& [module, units] : units_of_module) {
      plan_.scopes.push_back({module, std::vector<int>(units.begin(), units.end())});
    }
  }

  struct Open {
    int unit = -1;
    Bytes bytes;
  };

  std::span<const ParamSpec> params_;
  const ModuleTree& tree_;
  const PlanOptions& options_;
  ModelPlan plan_;
  std::vector<bool> persistent_;
  std::vector<int> block_of_module_;  // the block that a module lies in, or -1
  std::set<int> taken_;
  std::map<Key, Open> open_;  // units of neighbours that may still grow
};

}  // namespace

ModelPlan plan_units(std::span<const ParamSpec> params, const ModuleTree& tree,
                     const PlanOptions& options) {
  ModelPlan plan = Planner(params, tree, options).run();
  for (std::size_t i = 0; i < params.size(); ++i) STRATA_ASSERT(plan.unit_of_param[i] >= 0);
  return plan;
}

std::string describe(std::span<const ParamSpec> params, const ModelPlan& plan) {
  std::string text;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& p = params[i];
    text += fmt::format("parameter {}: shape [{}], {}, {}, group {}, unit {}\n", p.name,
                        fmt::join(p.shape, ", "), name_of(p.dtype),
                        p.trainable ? "trainable" : "frozen", p.group,
                        plan.units[static_cast<std::size_t>(plan.unit_of_param[i])].name);
  }
  return text;
}

}  // namespace strata::plan
