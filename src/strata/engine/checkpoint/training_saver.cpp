#include "strata/engine/checkpoint/training_saver.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <type_traits>

#include "strata/base/error.h"
#include "strata/checkpoint/writer.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/json.h"
#include "strata/format/safetensors.h"

namespace strata::engine {
namespace {

constexpr std::string_view kSavingTraining = "saving the checkpoint";
constexpr std::string_view kSavingAsync = "saving the checkpoint beside training";
constexpr Bytes kCopyGranule = 64_MiB;                 // of the memory of a copy
constexpr Bytes kImagePiece = 8_MiB;                   // that is copied and written at a time
constexpr auto kLook = std::chrono::milliseconds(10);  // for files of other ranks
constexpr auto kAsk = std::chrono::milliseconds(200);  // whether other ranks live
constexpr auto kLastWait = std::chrono::seconds(60);

void agree_on_tag(comm::Collectives& collectives, const std::string& tag) {
  const std::vector<std::string> tags = collectives.all_gather_text(tag);
  for (std::size_t rank = 1; rank < tags.size(); ++rank) {
    if (tags[rank] == tags[0]) continue;
    throw UsageError(
        "the ranks name different tags for one checkpoint; give the same on every rank; rank 0 has "
        "{}, rank {} has {}",
        format::in_quotes(tags[0]), rank, format::in_quotes(tags[rank]));
  }
}

// Collective: IoError on every rank where the files of all are more than the folder's disk has
// free.
void require_room(comm::Collectives& collectives, const SavedShards& saved,
                  const std::string& folder, io::FolderCalls& calls) {
  Bytes mine;
  for (const checkpoint::FileLayout& file : saved.files) mine += file.bytes();
  const std::vector<std::string> texts = collectives.all_gather_text(std::to_string(mine.value));
  agree_after(collectives, kSavingTraining, [&] {
    if (collectives.rank() != 0) return;
    Bytes wanted;
    for (const std::string& text : texts) wanted += Bytes(std::int64_t{std::stoll(text)});
    const std::optional<Bytes> free = calls.free_space(folder);
    if (!free || wanted <= *free) return;
    throw IoError(
        "a checkpoint is larger than what its file system has free; free space there, or give "
        "another folder: path={} wanted={} ({}) free={} ({})",
        folder, wanted.value, to_string(wanted), free->value, to_string(*free));
  });
}

// Keeps the error of the work for its owner.
template <typename Work>
void fulfil(std::promise<void>& promise, Work&& work) {
  try {
    std::forward<Work>(work)();
    promise.set_value();
  } catch (...) {
    promise.set_exception(std::current_exception());
  }
}

std::string_view saving(bool at_once) {
  return at_once ? kSavingTraining : kSavingAsync;
}

bool is_usable(comm::Collectives& collectives) {
  try {
    collectives.require_usable();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

// A save from its first step to its last.
struct AsyncSaver::Job {
  Job(Engine& engine, ShardStates& states, const SaveRequest& request, io::FolderCalls& calls);
  std::string part_path(int of_rank) const { return fmt::format("{}/.part-{}", folder, of_rank); }

  SaveRequest request;
  SavedShards saved;
  std::string folder;                                   // of the checkpoint to be
  std::optional<checkpoint::NewCheckpoint> checkpoint;  // of rank 0
  int rank = 0;
  std::optional<checkpoint::FileWriter> writer;
  std::vector<std::span<std::byte>> images;  // copies of the files
  std::promise<void> written;                // this rank's files
  std::promise<void> published;              // of rank 0
  std::atomic<bool> give_up = false;         // a rank has failed
};

// Collective: what must hold before anything is written, and the plan of the files.
AsyncSaver::Job::Job(Engine& engine, ShardStates& states, const SaveRequest& the_request,
                     io::FolderCalls& calls)
    : request(the_request) {
  comm::Collectives& collectives = engine.collectives();
  agree_on_tag(collectives, request.tag);
  agree_after(collectives, kSavingTraining, [&] {
    engine.require_intact_weights();
    engine.state_offload().require_all("saving a checkpoint");
    checkpoint::require_tag(request.tag);
    if (collectives.rank() == 0) checkpoint.emplace(request.folder, request.tag, calls);
  });
  rank = collectives.rank();
  folder = collectives.all_gather_text(checkpoint ? checkpoint->staging() : "").front();
  saved = plan_together(engine, states, request.content);
  saved.manifest.tag = request.tag;
  saved.manifest.world_size = collectives.world_size();
  saved.manifest.stage = engine.options().stage;
  saved.manifest.training = request.training;
  require_room(collectives, saved, folder, calls);
}

AsyncSaver::AsyncSaver(Engine& engine, std::shared_ptr<io::IoEngine> io,
                       std::shared_ptr<io::FolderCalls> calls,
                       std::optional<checkpoint::RingOptions> staging)
    : engine_(engine), io_(std::move(io)), calls_(std::move(calls)), staging_(staging) {}

AsyncSaver::~AsyncSaver() {
  if (!writer_.joinable()) return;
  job_->written.get_future().wait();
  if (job_->rank == 0) {
    const std::future<void> published = job_->published.get_future();
    const auto last = std::chrono::steady_clock::now() + kLastWait;
    while (published.wait_for(kAsk) != std::future_status::ready && !job_->give_up)
      job_->give_up = std::chrono::steady_clock::now() > last || !is_usable(engine_.collectives());
  }
  writer_.join();
}

Bytes copied_bytes(Engine& engine, Bytes more) {
  const ShardStates states(engine);
  const std::vector<std::string> kinds = kinds_of(engine, states, {});
  return align_up(more + plan_saved_shards(engine, states, {}, kinds).copied(), kCopyGranule);
}

void AsyncSaver::expect(Bytes more) {
  if (copy_ != nullptr || expected_.value > 0) return;
  expected_ = copied_bytes(engine_, more);
  if (expected_.value == 0) return;
  engine_.device().expect_host(expected_, memory::Kind::kStaging);
}

void AsyncSaver::start(const SaveRequest& request) {
  wait();
  engine_.finish_step();  // what it has left to say is better said before a checkpoint
  ShardStates states(engine_);
  auto made = std::make_unique<Job>(engine_, states, request, *calls_);
  Job& job = *made;
  agree_after(engine_.collectives(), saving(staging_.has_value()), [&] {
    if (!staging_) return copy_shards(job, states);
    job.writer.emplace(job.folder, job.saved.files, *io_, *calls_);
  });
  if (staging_) write_files(job, &states);
  job.request.content = {};  // what it refers to is copied, or written
  job_ = std::move(made);
  pending_ = true;
  writer_ = std::thread([this, &job] {
    if (!staging_) write_files(job, nullptr);
    if (job.rank == 0) publish(job);
  });
}

void AsyncSaver::copy_shards(Job& job, ShardStates& states) {
  const Bytes bytes = job.saved.copied();
  device::Device& device = engine_.device();
  if (bytes.value > 0 && (copy_ == nullptr || Bytes(copy_->bytes().size()) < bytes)) {
    const bool first = copy_ == nullptr;
    copy_.reset();
    // Expected memory that is not taken stays: a larger copy takes its place.
    if (first && expected_ < bytes && expected_.value > 0)
      device.expect_host(bytes, memory::Kind::kStaging);
    copy_ = device.allocate_host(std::max(bytes, expected_), memory::Kind::kStaging);
  }
  Bytes at;
  for (const checkpoint::FileLayout& file : job.saved.files) {
    const auto image = copy_->bytes().subspan(at.size(), file.bytes().size());
    checkpoint::TransferRing ring(image, kImagePiece);
    checkpoint::WholeFile source = shard_file(file, states, device, kImagePiece);
    checkpoint::Taker sink([](const checkpoint::Piece&) { return nullptr; });
    copy(source, sink, ring);
    job.images.push_back(image);
    at += align_up(file.bytes(), io::File::kDirectBlock);
  }
}

// `states`: null: the copy has the bytes.
void AsyncSaver::write_files(Job& job, ShardStates* states) {
  fulfil(job.written, [&] {
    const std::vector<checkpoint::FileLayout>& files = job.saved.files;
    if (!job.writer) job.writer.emplace(job.folder, files, *io_, *calls_);
    if (states == nullptr) {
      const Bytes piece = checkpoint::blocks_of(kImagePiece, files);
      for (const std::span<std::byte> image : job.images) {
        checkpoint::TransferRing ring(image, piece);
        const auto is_there = [](Bytes, std::span<std::byte>) {};
        checkpoint::WholeFile source(Bytes(image.size()), piece, is_there);
        job.writer->write(source, ring);
      }
    } else if (!files.empty()) {
      device::Device& device = engine_.device();
      checkpoint::TransferRing ring(
          {staging_->buffers, checkpoint::blocks_of(staging_->buffer_bytes, files)}, device);
      for (const checkpoint::FileLayout& file : files) {
        checkpoint::WholeFile source = shard_file(file, *states, device, ring.buffer_bytes());
        job.writer->write(source, ring);
      }
    }
    // Rank 0 looks for a file that is complete under its name.
    if (job.checkpoint) {
      for (const auto& [name, text] : job.request.texts)
        job.checkpoint->write_text(name, text, *io_);
    }
    const std::string path = job.part_path(job.rank);
    {
      const std::string text = to_text(job.writer->finish(job.saved.manifest.kinds));
      io::File file = calls_->create(path + ".new");
      io_->write(file, Bytes(), std::as_bytes(std::span(text)))->wait();
    }
    calls_->rename(path + ".new", path);
  });
}

// On rank 0, when the parts of all ranks are there.
void AsyncSaver::publish(Job& job) {
  fulfil(job.published, [&] {
    format::Manifest& manifest = job.saved.manifest;
    for (int rank = 0; rank < manifest.world_size; ++rank) {
      const std::string path = job.part_path(rank);
      while (!std::filesystem::exists(path)) {
        if (job.give_up) throw IoError("another rank has not written its part");
        std::this_thread::sleep_for(kLook);
      }
      append(manifest, format::parse_manifest_part(
                           format::read_text(path, "a rank's part", format::kManifestBytesMax)));
    }
    for (int rank = 0; rank < manifest.world_size; ++rank) calls_->remove_tree(job.part_path(rank));
    job.checkpoint->publish(manifest, job.request.publish, *io_);
  });
}

void AsyncSaver::wait() {
  if (!pending_) return;
  pending_ = false;
  const std::string_view what = saving(staging_.has_value());
  try {
    agree_after(engine_.collectives(), what, [&] { job_->written.get_future().get(); });
  } catch (const Error&) {
    job_->give_up = true;
    writer_.join();
    job_.reset();  // rank 0 takes away what was written
    throw;
  }
  writer_.join();
  const std::unique_ptr<Job> job = std::move(job_);
  agree_after(engine_.collectives(), what, [&] {
    if (job->rank == 0) job->published.get_future().get();
  });
}

void save_training(Engine& engine, const SaveRequest& request, io::IoEngine& io,
                   io::FolderCalls& calls, const checkpoint::RingOptions& staging) {
  const auto borrowed = [](auto& object) {
    return std::shared_ptr<std::remove_reference_t<decltype(object)>>(std::shared_ptr<void>(),
                                                                      &object);
  };
  AsyncSaver saver(engine, borrowed(io), borrowed(calls), staging);
  saver.start(request);
  saver.wait();
}

}  // namespace strata::engine
