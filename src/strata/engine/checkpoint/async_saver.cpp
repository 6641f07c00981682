#include "strata/engine/checkpoint/async_saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <filesystem>
#include <future>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/io/pending_range.h"

namespace strata::engine {
namespace {

constexpr std::string_view kSavingAsync = "saving the checkpoint beside training";
constexpr Bytes kCopyPiece = 64_MiB;                   // how much is queued for copying at a time
constexpr Bytes kWritePiece = 8_MiB;                   // and for writing
constexpr std::size_t kWritesMax = 8;                  // under way
constexpr auto kLook = std::chrono::milliseconds(10);  // for files of other ranks
constexpr auto kAsk = std::chrono::milliseconds(200);  // whether other ranks live
constexpr auto kLastWait = std::chrono::seconds(60);

std::string part_path(const std::string& folder, std::size_t rank) {
  return fmt::format("{}/.part-{}", folder, rank);
}

bool usable(comm::Collectives& collectives) {
  try {
    collectives.require_usable();
    return true;
  } catch (const Error&) {
    return false;
  }
}

Bytes room_of(const ShardFile& file) {
  return align_up(file.bytes(), 4_KiB);
}

}  // namespace

struct AsyncSaver::Job {
  SaveRequest request;
  SavedShards saved;
  std::string folder;                               // of the checkpoint to be
  std::optional<format::NewCheckpoint> checkpoint;  // of rank 0
  std::size_t rank = 0;
  std::size_t ranks = 1;
  std::vector<std::span<const std::byte>> images;  // of the files
  std::promise<void> written;                      // this rank's files
  std::promise<void> published;                    // of rank 0
  std::atomic<bool> ended = false;                 // the writing of these files
  std::atomic<bool> give_up = false;               // a rank has failed
};

AsyncSaver::AsyncSaver(Engine& engine, std::shared_ptr<io::IoEngine> io,
                       std::shared_ptr<io::FolderCalls> calls)
    : engine_(engine), io_(std::move(io)), calls_(std::move(calls)) {}

AsyncSaver::~AsyncSaver() {
  if (!writer_.joinable()) return;
  job_->written.get_future().wait();
  if (job_->rank == 0) {
    const std::future<void> published = job_->published.get_future();
    const auto last = std::chrono::steady_clock::now() + kLastWait;
    while (published.wait_for(kAsk) != std::future_status::ready && !job_->give_up)
      job_->give_up = std::chrono::steady_clock::now() > last || !usable(engine_.collectives());
  }
  writer_.join();
}

Bytes copied_bytes(Engine& engine, Bytes more) {
  const ShardStates states(engine);
  const std::vector<std::string> kinds = kinds_of(engine, states, {});
  Bytes bytes = more;
  for (const ShardFile& file : plan_saved_shards(engine, states, {}, kinds).files)
    bytes += room_of(file);
  return align_up(bytes, kCopyPiece);
}

void AsyncSaver::expect(Bytes more) {
  if (copy_ != nullptr || expected_.value > 0) return;
  expected_ = copied_bytes(engine_, more);
  if (expected_.value == 0) return;
  engine_.device().expect_host(expected_, memory::Kind::kStaging);
}

void AsyncSaver::start(const SaveRequest& request) {
  wait();
  auto job = std::make_unique<Job>();
  job->request = request;
  comm::Collectives& collectives = engine_.collectives();
  job->rank = static_cast<std::size_t>(collectives.rank());
  job->ranks = static_cast<std::size_t>(collectives.world_size());
  begin_save(engine_, request, *calls_, job->checkpoint);
  job->folder =
      collectives.all_gather_text(job->checkpoint ? job->checkpoint->staging() : "").front();
  {
    ShardStates states(engine_);
    job->saved = plan_together(engine_, states, request.content);
    require_room(collectives, job->saved, job->folder, *calls_);
    together(collectives, kSavingAsync, [&] { copy_shards(*job, states); });
  }
  job->request.content = {};  // what it refers to is copied
  job_ = std::move(job);
  pending_ = true;
  writer_ = std::thread([this] { write_and_publish(*job_); });
}

void AsyncSaver::copy_shards(Job& job, ShardStates& states) {
  Bytes bytes;
  for (const ShardFile& file : job.saved.files) bytes += room_of(file);
  device::Device& device = engine_.device();
  if (bytes.value > 0 && (copy_ == nullptr || Bytes(copy_->bytes().size()) < bytes)) {
    const bool first = copy_ == nullptr;
    copy_.reset();
    // What was expected is given to nobody else: a larger copy takes its place.
    if (first && expected_ < bytes && expected_.value > 0)
      device.expect_host(bytes, memory::Kind::kStaging);
    copy_ = device.allocate_host(std::max(bytes, expected_), memory::Kind::kStaging);
  }
  Bytes at;
  for (const ShardFile& file : job.saved.files) {
    const auto image = copy_->bytes().subspan(at.size(), file.bytes().size());
    for (Bytes done; done < file.bytes(); done += kCopyPiece) {
      const Bytes piece = std::min(kCopyPiece, file.bytes() - done);
      file.enqueue_fill(done, image.subspan(done.size(), piece.size()), states, device);
    }
    job.images.push_back(image);
    at += room_of(file);
  }
  device.compute_stream().synchronize();
}

void AsyncSaver::write_and_publish(Job& job) {
  try {
    write_files(job);
    job.written.set_value();
  } catch (...) {
    job.written.set_exception(std::current_exception());
  }
  job.ended = true;
  if (job.rank != 0) return;
  try {
    publish_when_all_are_there(job);
    job.published.set_value();
  } catch (...) {
    job.published.set_exception(std::current_exception());
  }
}

void AsyncSaver::write_files(Job& job) {
  format::ManifestPart part;
  std::deque<format::BlockWriter> writers = make_files(job.saved, job.folder, *io_, *calls_);
  for (std::size_t i = 0; i < job.saved.files.size(); ++i) {
    const ShardFile& file = job.saved.files[i];
    for (format::ManifestExtent& extent : file.extents(job.saved.kinds)) {
      extent.file = i;
      part.extents.push_back(extent);
    }
    format::BlockWriter& writer = writers.front();
    const Bytes piece = align_up(kWritePiece, writer.block());
    std::deque<std::unique_ptr<io::Transfer>> writes;
    while (writer.written() < file.bytes()) {
      const Bytes count = std::min(piece, file.bytes() - writer.written());
      writes.push_back(writer.write(job.images[i].subspan(writer.written().size(), count.size())));
      if (writes.size() < kWritesMax) continue;
      writes.front()->wait();
      writes.pop_front();
    }
    for (; !writes.empty(); writes.pop_front()) writes.front()->wait();
    part.files.push_back(writer.finish());
    writers.pop_front();
  }
  if (job.checkpoint) {
    for (const auto& [name, text] : job.request.texts) job.checkpoint->write_text(name, text, *io_);
  }
  // Complete under its name at once: rank 0 looks for it.
  const std::string path = part_path(job.folder, job.rank);
  {
    const std::string text = to_text(part);
    io::File file = calls_->create(path + ".new");
    io_->write(file, Bytes(), std::as_bytes(std::span(text)))->wait();
  }
  calls_->rename(path + ".new", path);
}

void AsyncSaver::publish_when_all_are_there(Job& job) {
  std::vector<std::string> parts;
  for (std::size_t rank = 0; rank < job.ranks; ++rank) {
    const std::string path = part_path(job.folder, rank);
    while (!std::filesystem::exists(path)) {
      if (job.give_up) throw IoError("another rank has not written its part");
      std::this_thread::sleep_for(kLook);
    }
    const io::File file(path, io::File::Mode::kRead);
    std::string text(file.size().size(), '\0');
    io_->read(file, Bytes(), std::as_writable_bytes(std::span(text)))->wait();
    parts.push_back(std::move(text));
  }
  for (std::size_t rank = 0; rank < job.ranks; ++rank)
    calls_->remove_tree(part_path(job.folder, rank));
  job.checkpoint->publish(
      manifest_of(job.request, std::move(job.saved), engine_.options().stage, parts),
      job.request.publish, *io_);
}

bool AsyncSaver::files_written() const {
  return job_ == nullptr || job_->ended;
}

void AsyncSaver::wait() {
  if (!pending_) return;
  pending_ = false;
  Failure mine;
  try {
    job_->written.get_future().get();
  } catch (...) {
    mine = failure_of(std::current_exception());
  }
  try {
    agree(engine_.collectives(), kSavingAsync, mine);
  } catch (const Error&) {
    job_->give_up = true;
    writer_.join();
    job_.reset();  // rank 0 takes away what was written
    throw;
  }
  writer_.join();
  const std::unique_ptr<Job> job = std::move(job_);
  together(engine_.collectives(), kSavingAsync, [&] {
    if (job->rank == 0) job->published.get_future().get();
  });
}

}  // namespace strata::engine
