#include "strata/plan/unit_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include "strata/base/error.h"

namespace strata::plan {
namespace {

// The parameters of a unit have all of this in common.
struct Key {
  DType dtype = DType::kFloat32;
  bool trainable = true;
  bool persistent = false;
  Placement place{};
  std::optional<UpdateRule> rule{};
  StateForm states = StateForm::kNumbers;
  auto operator<=>(const Key&) const = default;
};

class Planner {
 public:
  Planner(std::span<const ParamSpec> params, const ModuleTree& tree, const PlanOptions& options)
      : params_(params), tree_(tree), options_(options) {
    plan_.unit_of_param.assign(params.size(), -1);
    taken_.assign(params.size(), false);
    choose_persistent();
  }

  ModelPlan run() {
    block_of_module_ = holders(find_blocks(tree_, options_.wrap, options_.leaves));
    if (options_.one_by_one) {
      for (std::size_t i = 0; i < tree_.size(); ++i) visit_one_by_one(i);
    } else {
      visit_by_blocks();
    }
    make_scopes();
    return std::move(plan_);
  }

 private:
  struct Open {
    int unit = -1;
    std::size_t module = 0;  // the last whose parameters it took; a block's, for all that it holds
    Bytes bytes;
    Numel numel;
  };

  // For every module, which of these it lies in (or is), or -1.
  std::vector<int> holders(const std::vector<int>& modules) const {
    std::vector<int> result(tree_.size(), -1);
    for (const int module : modules) result[static_cast<std::size_t>(module)] = module;
    for (std::size_t i = 0; i < tree_.size(); ++i) {  // parents come first
      const int parent = tree_[i].parent;
      if (result[i] < 0 && parent >= 0) result[i] = result[static_cast<std::size_t>(parent)];
    }
    return result;
  }

  void choose_persistent() {
    persistent_.assign(params_.size(), false);
    Numel total;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const Numel n = params_[i].numel();
      if (params_[i].tile || n > options_.persistence_threshold ||
          options_.persistence_threshold.value == 0)
        continue;
      if (options_.persistence_total.value > 0 && total + n > options_.persistence_total) continue;
      persistent_[i] = true;
      total += n;
    }
  }

  Key key_of(int param) const {
    const ParamSpec& spec = params_[static_cast<std::size_t>(param)];
    return {spec.dtype, spec.trainable, persistent_[static_cast<std::size_t>(param)],
            spec.place, spec.rule,      spec.states};
  }

  void visit_by_blocks() {
    members_of_block_.resize(tree_.size());
    for (std::size_t i = 0; i < tree_.size(); ++i) {
      if (block_of_module_[i] < 0) continue;
      members_of_block_[static_cast<std::size_t>(block_of_module_[i])].push_back(i);
    }
    for (std::size_t i = 0; i < tree_.size(); ++i) visit(i);
  }

  // A unit never spans the border of a block.
  void visit_one_by_one(std::size_t module) {
    const int block = block_of_module_[module];
    if (block != open_in_) open_.clear();
    open_in_ = block;
    std::vector<int> params;
    take(tree_[module].params, params);
    const std::string& path = tree_[block >= 0 ? static_cast<std::size_t>(block) : module].path;
    for (const int param : params) {
      const Key key = key_of(param);
      if (key.persistent)
        add_to(open_, path, param, module, options_.unit_bytes);
      else if (bytes_of_param(param) <= options_.small_bytes)
        add_to(open_, path, param, module, options_.small_bytes);
      else
        put(new_unit(params_[static_cast<std::size_t>(param)].name, key), param);
    }
  }

  // Blocks are planned whole when their own module is reached; other modules by their own
  // parameters.
  void visit(std::size_t module) {
    const int block = block_of_module_[module];
    std::vector<int> params;
    if (block == static_cast<int>(module)) {
      for (const std::size_t member : members_of_block_[module]) take(tree_[member].params, params);
      open_.clear();
      std::map<Key, Open> units;
      for (const int param : params)
        add_to(units, tree_[module].path, param, module, options_.block_unit_bytes);
    } else if (block < 0) {
      take(tree_[module].params, params);
      for (const int param : params)
        add_to(open_, tree_[module].path, param, module, options_.unit_bytes);
    }
  }

  // Appends those parameters that no unit has yet (a tied one comes several times). Tiles get
  // units of their own at once.
  void take(const std::vector<int>& from, std::vector<int>& to) {
    for (const int param : from) {
      const auto index = static_cast<std::size_t>(param);
      if (taken_[index]) continue;
      taken_[index] = true;
      const ParamSpec& spec = params_[index];
      if (spec.tile) {
        put(new_unit(spec.name, key_of(param)), param);
        plan_.units.back().tile_uses = spec.tile->uses;
      } else {
        to.push_back(param);
      }
    }
  }

  // To the unit of its kind that may still grow, or to a new one where that would exceed `most`, or
  // what modules may share.
  void add_to(std::map<Key, Open>& units, const std::string& path, int param, std::size_t module,
              Bytes most) {
    const Key key = key_of(param);
    const Bytes bytes = bytes_of_param(param);
    const Numel numel = params_[static_cast<std::size_t>(param)].numel();
    auto it = units.find(key);
    // A persistent parameter stays gathered, so sharing a unit costs it nothing.
    if (it == units.end() || it->second.bytes + bytes > most ||
        (it->second.module != module && !key.persistent &&
         it->second.numel + numel > options_.shared_numel)) {
      it = units.insert_or_assign(key, Open{new_unit(path, key), module, Bytes(), Numel()}).first;
    }
    Open& open = it->second;
    put(open.unit, param);
    open.module = module;
    open.bytes += bytes;
    open.numel += numel;
  }

  Bytes bytes_of_param(int param) const {
    const ParamSpec& spec = params_[static_cast<std::size_t>(param)];
    return bytes_of(spec.numel(), spec.dtype);
  }

  int new_unit(const std::string& path, const Key& key) {
    plan_.units.push_back({unique_name(path, key),
                           {},
                           key.dtype,
                           key.trainable,
                           key.persistent,
                           key.place,
                           key.rule,
                           key.states});
    return static_cast<int>(plan_.units.size()) - 1;
  }

  // Messages, collectives and stores of states tell units apart by their names.
  std::string unique_name(const std::string& path, const Key& key) {
    const std::string name = path.empty() ? "(root)" : path;
    if (names_.insert(name).second) return name;
    const std::string detailed =
        fmt::format("{}:{}{}{}{}{}", name, name_of(key.dtype), key.trainable ? "" : ":frozen",
                    key.persistent ? ":persistent" : "",
                    key.rule ? fmt::format(":{}", traits_of(*key.rule).name) : "",
                    key.states == StateForm::k8Bit ? ":8bit" : "");
    if (names_.insert(detailed).second) return detailed;
    for (int& count = copies_[detailed];;) {
      std::string numbered = fmt::format("{}#{}", detailed, ++count + 1);
      if (names_.insert(numbered).second) return numbered;
    }
  }

  void put(int unit, int param) {
    plan_.units[static_cast<std::size_t>(unit)].params.push_back(param);
    plan_.unit_of_param[static_cast<std::size_t>(param)] = unit;
  }

  // A block's scope covers its whole subtree; another module's scope its own parameters.
  std::vector<int> scope_of_module() const {
    std::vector<int> scope = block_of_module_;
    if (options_.one_by_one) scope = holders(find_named(tree_, options_.wrap, options_.leaves));
    for (std::size_t i = 0; i < tree_.size(); ++i) {
      if (scope[i] >= 0) continue;
      // A module that is never called has its parameters read by the module that contains it.
      const bool by_parent = options_.one_by_one && !tree_[i].callable && tree_[i].parent >= 0;
      scope[i] = by_parent ? scope[static_cast<std::size_t>(tree_[i].parent)] : static_cast<int>(i);
    }
    return scope;
  }

  void make_scopes() {
    const std::vector<int> scope_of = scope_of_module();
    struct Needs {
      std::set<int> units;
      std::vector<int> tiles;
    };
    std::map<int, Needs> needs_of_module;
    for (std::size_t i = 0; i < tree_.size(); ++i) {
      Needs& needs = needs_of_module[scope_of[i]];
      for (const int param : tree_[i].params) {
        const int unit = plan_.unit_of_param[static_cast<std::size_t>(param)];
        if (plan_.units[static_cast<std::size_t>(unit)].tile())
          needs.tiles.push_back(unit);
        else
          needs.units.insert(unit);
      }
    }
    for (auto& [module, needs] : needs_of_module) {
      if (needs.units.empty() && needs.tiles.empty()) continue;
      plan_.scopes.push_back({module, std::vector<int>(needs.units.begin(), needs.units.end()),
                              std::move(needs.tiles)});
    }
  }

  std::span<const ParamSpec> params_;
  const ModuleTree& tree_;
  const PlanOptions& options_;
  ModelPlan plan_;
  std::vector<bool> persistent_;
  std::vector<int> block_of_module_;  // the block that a module lies in, or -1
  std::vector<std::vector<std::size_t>> members_of_block_;  // by the block's module
  std::vector<bool> taken_;                                 // parameters that have a unit
  std::map<Key, Open> open_;           // units of neighbours that may still grow
  int open_in_ = -1;                   // one by one: the block that they lie in, or -1
  std::set<std::string> names_;        // of units
  std::map<std::string, int> copies_;  // by name, how many more units wanted it
};

}  // namespace

ModelPlan plan_units(std::span<const ParamSpec> params, const ModuleTree& tree,
                     const PlanOptions& options) {
  for (const ParamSpec& param : params) {
    if (param.states == StateForm::k8Bit && param.known_first().value % kBlock8 != 0)
      throw ConfigError(
          "'{}' is used in tiles whose states would have 8 bits, and tiles must begin at multiples "
          "of {} elements then; cut it at rows that do, change strata.tiles.max_gather, or write "
          "strata.optimizer_states \"32bit\"; found a tile that begins at element {}",
          param.known_name(), kBlock8, param.known_first().value);
  }
  ModelPlan plan = Planner(params, tree, options).run();
  for (std::size_t i = 0; i < params.size(); ++i) STRATA_ASSERT(plan.unit_of_param[i] >= 0);
  return plan;
}

namespace {

// Indices of the parameters that embeddings own.
std::set<int> embedded_params(const ModuleTree& tree) {
  std::set<int> embedded;
  for (const ModuleNode& module : tree) {
    const std::string& name = module.class_name;
    if (name.find("mbed") != std::string::npos || name == "wte" || name == "wpe")
      embedded.insert(module.params.begin(), module.params.end());
  }
  return embedded;
}

bool ends_a_model(const std::string& name) {
  const std::string parts = "." + name + ".";
  return std::ranges::any_of(
      std::array{".lm_head.", ".score.", ".classifier.", ".qa_outputs."},
      [&](const char* part) { return parts.find(part) != std::string::npos; });
}

bool is_matrix(const std::vector<std::int64_t>& shape) {
  if (shape.size() > 3) return shape[1] > 1;  // of a convolution
  return shape.size() > 1 && std::min(shape[shape.size() - 2], shape.back()) > 1;
}

}  // namespace

void take_muon(std::span<ParamSpec> params, const ModuleTree& tree) {
  const std::set<int> embedded = embedded_params(tree);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::string& name = params[i].known_name();
    const bool hidden = name.find("embed") == std::string::npos && !ends_a_model(name) &&
                        !embedded.contains(static_cast<int>(i));
    if (params[i].trainable && hidden && is_matrix(params[i].known_shape()))
      params[i].rule = UpdateRule::kMuon;
  }
}

void take_8_bits(std::span<ParamSpec> params, const ModuleTree& tree, std::int64_t least) {
  const std::set<int> embedded = embedded_params(tree);
  for (std::size_t i = 0; i < params.size(); ++i) {
    std::int64_t numel = 1;
    for (const std::int64_t d : params[i].known_shape()) numel *= d;
    const bool counts = params[i].trainable && params[i].rule != UpdateRule::kMuon;
    if (counts && numel >= least && !embedded.contains(static_cast<int>(i)))
      params[i].states = StateForm::k8Bit;
  }
}

std::string describe(std::span<const ParamSpec> params, const ModelPlan& plan) {
  std::vector<std::size_t> place(params.size());
  for (const UnitSpec& unit : plan.units) {
    for (std::size_t i = 0; i < unit.params.size(); ++i)
      place[static_cast<std::size_t>(unit.params[i])] = i;
  }
  const auto on = [](std::string_view what, std::optional<memory::Tier> tier) {
    return tier ? fmt::format(", {} on {}", what, memory::name_of(*tier)) : std::string();
  };
  std::string text;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& p = params[i];
    const UnitSpec& unit = plan.units[static_cast<std::size_t>(plan.unit_of_param[i])];
    text += fmt::format(
        "parameter {}: shape [{}], {}, {}, group {}, place {} of unit {}{}{}{}{}{}{}{}\n", p.name,
        fmt::join(p.shape, ", "), name_of(p.dtype), p.trainable ? "trainable" : "frozen", p.group,
        place[i], unit.name, unit.persistent ? ", persistent" : "",
        on("weights", unit.place.weights), on("states", unit.place.states),
        unit.rule ? fmt::format(", updated by {}", traits_of(*unit.rule).name) : "",
        unit.states == StateForm::k8Bit ? ", states in 8 bits" : "",
        p.tile ? fmt::format(", a tile used {} times", p.tile->uses) : "",
        p.channels_last ? ", channels_last" : "");
  }
  return text;
}

}  // namespace strata::plan
