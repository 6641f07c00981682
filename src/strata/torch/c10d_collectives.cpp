#include "strata/torch/c10d_collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <set>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/dtype.h"
#include "strata/torch/peer_notes.h"

namespace strata::torch {
namespace {

at::Tensor as_tensor(const void* data, std::int64_t numel, c10::ScalarType type) {
  // c10d takes mutable tensors also for what it only reads.
  return at::from_blob(const_cast<void*>(data), {numel}, at::TensorOptions().dtype(type));
}

at::Tensor byte_tensor(std::span<const std::byte> bytes) {
  return as_tensor(bytes.data(), static_cast<std::int64_t>(bytes.size()), at::kByte);
}

using Names = std::set<std::string>;  // of the living buffers of one rank

class HostSharedBuffer final : public comm::SharedBuffer {
 public:
  HostSharedBuffer(std::string name, Bytes bytes, std::shared_ptr<Names> names)
      : name_(std::move(name)), memory_(bytes), names_(std::move(names)) {}
  ~HostSharedBuffer() override { names_->erase(name_); }
  std::span<std::byte> local() override { return memory_.bytes(); }
  const std::string& name() const override { return name_; }

 private:
  std::string name_;
  memory::HostBuffer memory_;
  std::shared_ptr<Names> names_;
};

// An operation of the group, and what is to be done with its result once it is there.
class GroupWork final : public comm::Work {
 public:
  // `fail` turns the backend's error into the group's own, and throws it.
  using Fail = std::function<void(const std::string&)>;

  GroupWork(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish, Fail fail)
      : work_(std::move(work)), finish_(std::move(finish)), fail_(std::move(fail)) {}
  ~GroupWork() override {
    try {
      GroupWork::wait();
    } catch (const std::exception& error) {
      failure_ = error.what();  // told by wait(), if anybody asked
    }
  }

  bool done() override { return !work_ || work_->isCompleted(); }

  void wait() override {
    if (failure_.has_value()) throw CommError(*failure_);
    if (!work_) return;
    const auto work = std::move(work_);
    work_ = nullptr;
    try {
      work->wait();
      if (finish_) finish_();
    } catch (const std::exception& error) {
      try {
        fail_(error.what());
      } catch (const CommError& explained) {
        failure_ = explained.what();
        throw;
      }
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
  Fail fail_;
  std::optional<std::string> failure_;
};

class C10dCollectives final : public comm::Collectives {
 public:
  C10dCollectives(c10::intrusive_ptr<c10d::Backend> group, c10::intrusive_ptr<c10d::Store> store,
                  const std::string& id, std::string name)
      : group_(std::move(group)),
        rank_(group_->getRank()),
        world_size_(group_->getSize()),
        name_(std::move(name)),
        notes_(std::move(store), id, rank_, world_size_) {}

  ~C10dCollectives() override {
    if (broken_.empty()) notes_.post(PeerNote::Kind::kLeft, "");
  }

  std::string_view name() const override { return name_; }
  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  bool one_sided() const override { return false; }
  bool deterministic() const override { return false; }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    if (!broken_.empty()) throw CommError(broken_);
    throw_if_a_peer_failed();
    if (!names_->insert(name).second) {
      throw UsageError(fmt::format("a buffer named '{}' exists already; names are unique", name));
    }
    return std::make_unique<HostSharedBuffer>(std::move(name), bytes, names_);
  }

  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    if (Bytes(flat.size()) != slices.slice_bytes * world_size()) {
      throw UsageError(fmt::format(
          "the target of the all-gather of '{}' must hold {} slices of {} bytes; it has {}", tag,
          world_size(), slices.slice_bytes.value, flat.size()));
    }
    const std::string what =
        fmt::format("all-gather of '{}' ({} bytes a rank)", tag, slices.slice_bytes.value);
    const Bytes end = slices.first_offset + slices.stride * rank() + slices.slice_bytes;
    require_inside(slices.buffer, end, what);
    require_same_operation(what);
    if (slices.slice_bytes.value == 0)
      return std::make_unique<GroupWork>(nullptr, nullptr, nullptr);
    const Bytes offset = slices.first_offset + slices.stride * rank();
    const auto mine = const_cast<comm::SharedBuffer*>(slices.buffer)
                          ->local()
                          .subspan(offset.size(), slices.slice_bytes.size());
    at::Tensor target = byte_tensor(flat);
    at::Tensor source = byte_tensor(mine);
    return guarded(what, [&] {
      return std::make_unique<GroupWork>(group_->_allgather_base(target, source), nullptr,
                                         failure_of(what));
    });
  }

  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    const auto numel = static_cast<std::int64_t>(reduction.result.size());
    const std::string what =
        fmt::format("reduction of '{}' ({} {} a rank)", tag, numel, name_of(reduction.dtype));
    if (!is_floating(reduction.dtype) || reduction.dtype == DType::kFloat64) {
      throw UsageError(fmt::format("{} must be of float32, bfloat16 or float16", what));
    }
    require_inside(reduction.source,
                   reduction.source_offset + bytes_of(Numel(numel * world_size()), reduction.dtype),
                   what);
    require_same_operation(what);
    if (numel == 0) return std::make_unique<GroupWork>(nullptr, nullptr, nullptr);
    const auto scalar = to_scalar_type(reduction.dtype);
    auto* memory = const_cast<comm::SharedBuffer*>(reduction.source)->local().data();
    at::Tensor source =
        as_tensor(memory + reduction.source_offset.size(), numel * world_size(), scalar);
    at::Tensor sum = at::empty({numel}, at::TensorOptions().dtype(scalar));
    at::Tensor result = as_tensor(reduction.result.data(), numel, at::kFloat);
    const auto finish = [sum, result, scale = reduction.scale,
                         accumulate = reduction.accumulate]() mutable {
      const at::Tensor scaled = sum.to(at::kFloat).mul_(scale);
      accumulate ? result.add_(scaled) : result.copy_(scaled);
    };
    return guarded(what, [&] {
      return std::make_unique<GroupWork>(group_->_reduce_scatter_base(sum, source), finish,
                                         failure_of(what));
    });
  }

  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    const auto count = static_cast<std::int64_t>(values.size());
    require_same_operation(fmt::format("all-reduce of {} values", count));
    if (count == 0) return;
    at::Tensor mine = as_tensor(values.data(), count, at::kDouble).clone();
    at::Tensor all = at::empty({count * world_size()}, at::TensorOptions().dtype(at::kDouble));
    guarded("all-reduce", [&] { return group_->_allgather_base(all, mine)->wait(); });
    const auto* by_rank = all.const_data_ptr<double>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      double result = by_rank[i];
      for (int r = 1; r < world_size(); ++r) {
        const double other = by_rank[static_cast<std::size_t>(r) * values.size() + i];
        if (op == comm::ReduceOp::kSum) result += other;
        if (op == comm::ReduceOp::kMin) result = std::min(result, other);
        if (op == comm::ReduceOp::kMax) result = std::max(result, other);
      }
      values[i] = result;
    }
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    if (root < 0 || root >= world_size()) {
      throw UsageError(fmt::format("the root of a broadcast must be a rank, 0 to {}; got {}",
                                   world_size() - 1, root));
    }
    require_same_operation(fmt::format("broadcast of {} bytes from rank {}", bytes.size(), root));
    if (bytes.empty()) return;
    std::vector<at::Tensor> tensors{byte_tensor(bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    guarded("broadcast", [&] { return group_->broadcast(tensors, options)->wait(); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return gather_text(text);
  }

  void barrier() override { require_same_operation("barrier"); }

  void abort(std::string_view reason) noexcept override {
    if (!broken_.empty()) return;
    broken_ = fmt::format("rank {} gave up: {}", rank(), reason);
    notes_.post(PeerNote::Kind::kGaveUp, broken_);
  }

 private:
  static constexpr std::chrono::milliseconds kNoteWait{1000};

  template <typename Call>
  auto guarded(std::string_view what, Call&& call) -> decltype(call()) {
    if (!broken_.empty()) throw CommError(broken_);
    try {
      return call();
    } catch (const std::exception& error) {
      fail(what, error.what());
    }
  }

  GroupWork::Fail failure_of(const std::string& what) {
    return [this, what](const std::string& error) {
      if (!broken_.empty()) throw CommError(broken_);
      fail(what, error);
    };
  }

  // Asks the others what happened to them, since the backend only knows that a connection went.
  [[noreturn]] void fail(std::string_view what, std::string_view error) {
    notes_.post(PeerNote::Kind::kAt, std::string(what));
    const auto notes = notes_.wait_for_all(kNoteWait);
    const std::string cause = most_telling(notes);
    broken_ = fmt::format("rank {}: {} failed: {} ({})", rank(), what, cause, error);
    notes_.post(PeerNote::Kind::kFailed, broken_);
    throw CommError(broken_);
  }

  // A reason that a rank gave, else one that is not there, else what another made of it.
  std::string most_telling(const std::vector<std::optional<PeerNote>>& notes) const {
    std::string absent;
    std::string failed;
    for (int r = 0; r < world_size(); ++r) {
      const auto& note = notes[static_cast<std::size_t>(r)];
      if (r == rank()) continue;
      if (!note.has_value()) {
        absent = fmt::format("rank {} did not come or is gone", r);
      } else if (note->kind == PeerNote::Kind::kGaveUp) {
        return note->text;
      } else if (note->kind == PeerNote::Kind::kLeft) {
        absent = fmt::format("rank {} has left", r);
      } else if (note->kind == PeerNote::Kind::kFailed) {
        failed = note->text;
      }
    }
    if (!absent.empty()) return absent;
    return failed.empty() ? "the connection broke" : failed;
  }

  void throw_if_a_peer_failed() {
    for (const auto& note : notes_.read()) {
      if (!note.has_value() || note->kind == PeerNote::Kind::kAt ||
          note->kind == PeerNote::Kind::kLeft)
        continue;
      broken_ = note->text;
      throw CommError(broken_);
    }
  }

  static void require_inside(const comm::SharedBuffer* buffer, Bytes end, const std::string& what) {
    if (buffer == nullptr) throw UsageError(fmt::format("{} needs a buffer; got none", what));
    const std::size_t size = const_cast<comm::SharedBuffer*>(buffer)->local().size();
    if (end.size() <= size) return;
    throw UsageError(fmt::format("{} needs {} bytes of buffer '{}', which has {}", what, end.value,
                                 buffer->name(), size));
  }

  std::vector<std::string> gather_text(const std::string& text) {
    const int world = world_size();
    std::int64_t length = static_cast<std::int64_t>(text.size());
    at::Tensor mine = as_tensor(&length, 1, at::kLong);
    at::Tensor lengths = at::empty({world}, at::TensorOptions().dtype(at::kLong));
    guarded("exchange of texts", [&] { return group_->_allgather_base(lengths, mine)->wait(); });
    const auto* by_rank = lengths.const_data_ptr<std::int64_t>();
    const std::int64_t longest =
        std::max<std::int64_t>(1, *std::max_element(by_rank, by_rank + world));
    std::string padded = text;
    padded.resize(static_cast<std::size_t>(longest));
    at::Tensor source = as_tensor(padded.data(), longest, at::kByte);
    at::Tensor all = at::empty({longest * world}, at::TensorOptions().dtype(at::kByte));
    guarded("exchange of texts", [&] { return group_->_allgather_base(all, source)->wait(); });
    std::vector<std::string> texts;
    const auto* bytes = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
    for (int r = 0; r < world; ++r)
      texts.emplace_back(bytes + r * longest, static_cast<std::size_t>(by_rank[r]));
    return texts;
  }

  // A handful of bytes from everybody, before sizes and kinds must agree.
  void require_same_operation(const std::string& what) {
    std::uint64_t hash = std::hash<std::string>{}(what);
    at::Tensor mine = as_tensor(&hash, sizeof(hash), at::kByte);
    at::Tensor all = at::empty({static_cast<std::int64_t>(sizeof(hash)) * world_size()},
                               at::TensorOptions().dtype(at::kByte));
    guarded(what, [&] { return group_->_allgather_base(all, mine)->wait(); });
    const auto* bytes = all.const_data_ptr<std::uint8_t>();
    bool same = true;
    for (int r = 1; r < world_size(); ++r) {
      same = same && std::memcmp(bytes, bytes + static_cast<std::size_t>(r) * sizeof(hash),
                                 sizeof(hash)) == 0;
    }
    if (same) return;
    const std::vector<std::string> texts = gather_text(what);
    std::string message = "the ranks do different things at the same time:";
    for (std::size_t r = 0; r < texts.size(); ++r)
      message += fmt::format(" rank {}: {};", r, texts[r]);
    broken_ = message + " every rank must use the same units in the same order";
    notes_.post(PeerNote::Kind::kFailed, broken_);
    throw CommError(broken_);
  }

  c10::intrusive_ptr<c10d::Backend> group_;
  int rank_;
  int world_size_;
  std::string name_;
  PeerNotes notes_;
  std::shared_ptr<Names> names_ = std::make_shared<Names>();
  std::string broken_;  // the first error; empty while all is well
};

}  // namespace

std::unique_ptr<comm::Collectives> make_c10d_collectives(c10::intrusive_ptr<c10d::Backend> group,
                                                         c10::intrusive_ptr<c10d::Store> store,
                                                         std::string id, std::string name) {
  return std::make_unique<C10dCollectives>(std::move(group), std::move(store), id, std::move(name));
}

}  // namespace strata::torch
