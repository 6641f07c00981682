#include "strata/comm/peer/peer_work.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::comm {

StreamWork::StreamWork(std::shared_ptr<PeerLink> link, std::unique_ptr<device::Event> end,
                       WorkTimes times)
    : link_(std::move(link)), end_(std::move(end)), times_(std::move(times)) {}

StreamWork::~StreamWork() {
  try {
    join();
  } catch (const std::exception&) {
    return;  // who wants the error calls wait()
  }
}

void StreamWork::wait() {
  if (end_ == nullptr) return;
  link_->require_usable();
  join();
}

void StreamWork::join() {
  if (end_ != nullptr) link_->device().compute_stream().wait_for(*end_);
  end_.reset();
}

RoundWork::RoundWork(std::shared_ptr<PeerLink> link, std::uint32_t round)
    : link_(std::move(link)), round_(round) {
  link_->require_usable();
  for (int turn = 0; turn < link_->peers(); ++turn) {
    link_->device().write_flag(
        link_->flag(PeerFlags::Kind::kRounds, link_->rank(), link_->peer(turn)), round_,
        link_->transfers());
  }
  own_ = link_->transfers().record();
}

bool RoundWork::done() {
  if (!own_->done()) return false;
  for (int turn = 0; turn < link_->peers(); ++turn) {
    const device::Flag& theirs =
        link_->flag(PeerFlags::Kind::kRounds, link_->peer(turn), link_->rank());
    if (!device::reached(theirs.load(), round_)) return false;
  }
  return true;
}

void RoundWork::wait() {
  link_->require_usable();
  if (std::exchange(waits_, true)) return;
  device::Stream& compute = link_->device().compute_stream();
  compute.wait_for(*own_);
  for (int turn = 0; turn < link_->peers(); ++turn)
    link_->wait_for(PeerFlags::Kind::kRounds, link_->peer(turn), round_, compute);
}

ReductionWork::ReductionWork(std::shared_ptr<PeerLink> link,
                             std::shared_ptr<PeerReductions> reductions,
                             PeerReductions::Started started, WorkTimes times)
    : link_(std::move(link)),
      reductions_(std::move(reductions)),
      started_(std::move(started)),
      times_(std::move(times)) {}

ReductionWork::~ReductionWork() {
  try {
    join();
  } catch (const std::exception&) {
    return;  // who wants the error calls wait()
  }
}

bool ReductionWork::done() {
  return started_.added == nullptr ||
         (started_.added->done() && reductions_->read_by_all(started_.number));
}

void ReductionWork::wait() {
  if (started_.added == nullptr) return;
  link_->require_usable();
  join();
  link_->require_usable();
}

void ReductionWork::join() {
  if (started_.added == nullptr) return;
  link_->device().compute_stream().wait_for(*started_.added);
  reductions_->wait_for_readers(started_.number);
  started_.added.reset();
}

}  // namespace strata::comm
