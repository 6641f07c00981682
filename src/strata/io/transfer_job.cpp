#include "strata/io/transfer_job.h"

#include <algorithm>
#include <utility>

namespace strata::io {
namespace {

class JobTransfer final : public Transfer {
 public:
  explicit JobTransfer(std::shared_ptr<TransferJob> job) : job_(std::move(job)) {}
  ~JobTransfer() override { job_->wait_quietly(); }
  bool done() override { return job_->done(); }
  void wait() override { job_->wait(); }
  std::optional<TransferTimes> times() const override { return job_->times(); }

 private:
  std::shared_ptr<TransferJob> job_;
};

std::int64_t pieces_of(Bytes wanted, Bytes piece, Bytes first_extra) {
  if (wanted == Bytes()) return 0;
  const std::int64_t rest = (wanted - first_extra).value;
  return std::max<std::int64_t>(1, (rest + piece.value - 1) / piece.value);
}

}  // namespace

TransferJob::TransferJob(const PendingRange& range, Bytes piece)
    : range_(range),
      piece_(piece),
      first_extra_(range.to_direct_block()),
      pieces_(pieces_of(range.wanted(), piece, first_extra_)) {}

std::optional<TransferJob::Piece> TransferJob::claim() {
  const std::lock_guard lock(mutex_);
  if (error_ != nullptr || claimed_ == pieces_) return std::nullopt;
  const std::int64_t index = claimed_++;
  if (index == 0) times_.begin = std::chrono::steady_clock::now();
  const Bytes begin = index == 0 ? Bytes() : piece_ * index + first_extra_;
  const Bytes end = claimed_ == pieces_ ? range_.wanted() : piece_ * claimed_ + first_extra_;
  return Piece{index, range_.piece(begin, end - begin), claimed_ == pieces_};
}

// Pieces are claimed in order, so all those below a failed one have been claimed and will be
// settled: the error at the lowest offset always wins.
void TransferJob::settle(std::int64_t index, std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  ++settled_;
  if (error != nullptr && (error_ == nullptr || index < error_index_)) {
    error_ = std::move(error);
    error_index_ = index;
  }
  if (!finished()) return;
  times_.end = std::chrono::steady_clock::now();
  finished_.notify_all();
}

bool TransferJob::done() {
  const std::lock_guard lock(mutex_);
  return finished();
}

void TransferJob::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return finished(); });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void TransferJob::wait_quietly() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return finished(); });
}

std::optional<TransferTimes> TransferJob::times() const {
  const std::lock_guard lock(mutex_);
  if (!finished() || pieces_ == 0) return std::nullopt;
  return times_;
}

bool TransferJob::finished() const {
  return settled_ == claimed_ && (error_ != nullptr || claimed_ == pieces_);
}

std::unique_ptr<Transfer> transfer_of(std::shared_ptr<TransferJob> job) {
  return std::make_unique<JobTransfer>(std::move(job));
}

}  // namespace strata::io
