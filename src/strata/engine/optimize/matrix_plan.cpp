#include "strata/engine/optimize/matrix_plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "strata/base/dtype.h"

namespace strata::engine {
namespace {

constexpr Numel kLine{64};  // elements: pieces begin where kernels read and write at their best

struct Item {
  const MatrixParam* param = nullptr;
  Numel begin;  // in the parameter
  Numel numel;
  double cost = 0.0;
};

// The items of one unit that have no owner by their place.
using UnitItems = std::vector<Item>;

// Fills windows, one behind the other.
class Windows {
 public:
  Windows(int ranks, Numel most)
      : ranks_(ranks), most_(most), owned_(static_cast<std::size_t>(ranks)) {}

  // Whether an item for this owner would begin another window.
  bool full_for(int owner, Numel numel) const {
    const Numel owned = owned_[static_cast<std::size_t>(owner)];
    return owned > Numel() && owned + numel > most_;
  }
  void add(const Item& item, int owner) {
    Numel& owned = owned_[static_cast<std::size_t>(owner)];
    window_.runs.push_back({item.param->unit, item.param->param, item.begin, item.numel, owner,
                            bytes_of(owned, DType::kBFloat16)});
    params_.push_back(item.param);
    owned += align_up(item.numel, kLine);
  }
  // Ends the window, where there is one.
  void close() {
    if (window_.runs.empty()) return;
    window_.there = comm::Parcels(ranks_);
    for (std::size_t run = 0; run < window_.runs.size(); ++run) cut(run);
    window_.back = window_.there.reversed();
    for (MatrixPiece& piece : window_.pieces) {
      const int owner = window_.runs[piece.run].owner;
      piece.in_source += window_.there.in_source(piece.holder, owner);
      piece.in_target += window_.there.in_target(piece.holder, owner);
    }
    window_.workspace = bytes_of(*std::ranges::max_element(owned_), DType::kBFloat16);
    done_.push_back(std::exchange(window_, {}));
    params_.clear();
    owned_.assign(owned_.size(), Numel());
  }
  std::vector<MatrixWindow> take() {
    close();
    return std::move(done_);
  }

 private:
  void cut(std::size_t run) {
    const MatrixRun& of = window_.runs[run];
    const Numel shard = params_[run]->shard;
    const Numel begin = params_[run]->offset + of.begin;  // in the unit
    const Numel end = begin + of.numel;
    for (Numel at = begin; at < end;) {
      const auto holder = static_cast<int>(at / shard);
      const Numel until = std::min(end, shard * (holder + 1));
      const Bytes before = window_.there.at(holder, of.owner);
      window_.pieces.push_back(
          {run, holder, at - begin, until - at, at - shard * holder, before, before});
      window_.there.add(holder, of.owner, bytes_of(align_up(until - at, kLine), DType::kBFloat16));
      at = until;
    }
  }

  int ranks_;
  Numel most_;
  std::vector<Numel> owned_;  // by owner, of the window
  MatrixWindow window_;
  std::vector<const MatrixParam*> params_;  // of its runs
  std::vector<MatrixWindow> done_;
};

// The matrices that stay in place, by rank, and what they cost there.
struct InPlace {
  std::vector<Windows> windows;
  std::vector<double> loads;
};

// Those in place go to the windows of their rank, and the others to `items`.
void place_apart(const MatrixParam& param, Numel most, InPlace& in_place, UnitItems& items) {
  const Numel each(param.numel.value / param.apart);
  const double cost = param.cost / static_cast<double>(param.apart);
  Item run;  // of neighbours that lie with one rank
  int holder = 0;
  const auto end_run = [&] {
    if (run.numel > Numel()) {
      Windows& own = in_place.windows[static_cast<std::size_t>(holder)];
      if (own.full_for(holder, run.numel)) own.close();
      own.add(run, holder);
    }
    run = {};
  };
  for (std::int64_t i = 0; i < param.apart; ++i) {
    const Item item{&param, each * i, each, cost};
    const Numel begin = param.offset + item.begin;
    const auto first = static_cast<int>(begin / param.shard);
    const auto last = static_cast<int>((begin + each - Numel(1)) / param.shard);
    if (first != last) {
      end_run();
      items.push_back(item);
      continue;
    }
    if (run.numel > Numel() && (holder != first || run.numel + each > most)) end_run();
    if (run.numel == Numel()) run = {&param, item.begin, Numel(), 0.0};
    holder = first;
    run.numel += each;
    in_place.loads[static_cast<std::size_t>(first)] += cost;
  }
  end_run();
}

// Each rank gets one unit's matrices; all windows have of each kind as many for every rank.
void take_turns(std::span<const UnitItems* const> units, Windows& windows) {
  for (std::size_t kind = 0; kind < units.front()->size(); ++kind) {
    if (windows.full_for(0, (*units.front())[kind].numel)) windows.close();
    for (std::size_t i = 0; i < units.size(); ++i)
      windows.add((*units[i])[kind], static_cast<int>(i));
  }
}

void deal_by_cost(UnitItems items, Windows& windows, std::vector<double> loads) {
  windows.close();
  const auto order = [](const Item& item) {
    return std::tuple(-item.cost, item.param->param, item.begin);
  };
  std::ranges::sort(items, {}, order);
  for (const Item& item : items) {
    const auto least = std::ranges::min_element(loads);
    const auto owner = static_cast<int>(least - loads.begin());
    if (windows.full_for(owner, item.numel)) windows.close();
    windows.add(item, owner);
    *least += item.cost;
  }
}

}  // namespace

MatrixPlan plan_matrices(std::span<const MatrixParam> params, int ranks, int position,
                         const WindowBounds& most) {
  const auto count = static_cast<std::size_t>(ranks);
  InPlace in_place{std::vector<Windows>(count, Windows(ranks, most.in_place)),
                   std::vector<double>(count)};
  std::map<int, UnitItems> units;
  for (const MatrixParam& param : params) {
    const Numel each(param.numel.value / param.apart);
    if (ranks == 1 || (param.apart > 1 && each.value % kLine.value == 0))
      place_apart(param, most.in_place, in_place, units[param.unit]);
    else
      units[param.unit].push_back({&param, Numel(), param.numel, param.cost});
  }
  // Turns give all ranks as much, and what stays in place does not.
  const bool has_in_place = std::ranges::any_of(in_place.loads, [](double l) { return l > 0.0; });
  // Units are alike whose matrices are.
  std::map<std::vector<std::pair<std::int64_t, double>>, std::vector<const UnitItems*>> alike;
  Windows windows(ranks, most.exchanged);
  for (const auto& [unit, items] : units) {
    if (items.empty()) continue;
    std::vector<std::pair<std::int64_t, double>> kinds;
    for (const Item& item : items) kinds.emplace_back(item.numel.value, item.cost);
    std::vector<const UnitItems*>& waiting = alike[kinds];
    waiting.push_back(&items);
    if (has_in_place || waiting.size() < count) continue;
    take_turns(waiting, windows);
    waiting.clear();
  }
  UnitItems rest;
  for (const auto& [kinds, waiting] : alike) {
    for (const UnitItems* const items : waiting)
      rest.insert(rest.end(), items->begin(), items->end());
  }
  deal_by_cost(std::move(rest), windows, in_place.loads);

  MatrixPlan plan;
  plan.exchanged = windows.take();
  for (const MatrixWindow& window : plan.exchanged) {
    plan.workspace = std::max(plan.workspace, window.workspace);
    for (int rank = 0; rank < ranks; ++rank) {
      plan.given = std::max(plan.given, window.there.sent(rank));
      plan.taken = std::max(plan.taken, window.there.received(rank));
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<MatrixWindow> own = in_place.windows[static_cast<std::size_t>(rank)].take();
    for (const MatrixWindow& window : own)
      plan.workspace = std::max(plan.workspace, window.workspace);
    if (rank == position) plan.in_place = std::move(own);
  }
  return plan;
}

}  // namespace strata::engine
