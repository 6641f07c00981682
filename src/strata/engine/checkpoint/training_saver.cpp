#include "strata/engine/checkpoint/training_saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <optional>

#include "strata/base/error.h"
#include "strata/checkpoint/writer.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/message_text.h"

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
    throw UsageError(fmt::format(
        "the ranks name different tags for one checkpoint; give the same on every rank; rank 0 has "
        "{}, rank {} has {}",
        format::in_quotes(tags[0]), rank, format::in_quotes(tags[rank])));
  }
}

// Collective: every rank has the same kinds, in one order.
SavedShards plan_together(Engine& engine, const ShardStates& states, const SavedContent& content) {
  // A rank whose shards hold nothing of a parameter does not know what is kept of it.
  std::string mine;
  for (const std::string& kind : kinds_of(engine, states, content)) mine += kind + "\n";
  std::vector<std::string> kinds;
  for (const std::string& text : engine.collectives().all_gather_text(mine)) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = text.find('\n', at);
      kinds.push_back(text.substr(at, end - at));
      at = end + 1;
    }
  }
  return plan_saved_shards(engine, states, content, kinds);
}

// Collective: IoError on every rank where the files of all are more than the folder's disk has
// free.
void require_room(comm::Collectives& collectives, const SavedShards& saved,
                  const std::string& folder, io::FolderCalls& calls) {
  Bytes mine;
  for (const ShardFile& file : saved.files) mine += file.layout.bytes();
  const std::vector<std::string> texts = collectives.all_gather_text(std::to_string(mine.value));
  agree_after(collectives, kSavingTraining, [&] {
    if (collectives.rank() != 0) return;
    Bytes wanted;
    for (const std::string& text : texts) wanted += Bytes(std::int64_t{std::stoll(text)});
    const std::optional<Bytes> free = calls.free_space(folder);
    if (!free || wanted <= *free) return;
    throw IoError(
        fmt::format("a checkpoint is larger than what its file system has free; free space there, "
                    "or give another folder: path={} wanted={} ({}) free={} ({})",
                    folder, wanted.value, to_string(wanted), free->value, to_string(*free)));
  });
}

// The state of a save from its first step to its last.
struct SaveJob {
  SaveRequest request;
  SavedShards saved;
  std::string folder;                               // of the checkpoint to be
  std::optional<format::NewCheckpoint> checkpoint;  // of rank 0
  std::size_t rank = 0;
  std::size_t ranks = 1;
  int stage = 0;
};

// Collective: what must hold before anything is written, and the plan of the files.
void begin_save(SaveJob& job, Engine& engine, ShardStates& states, const SaveRequest& request,
                io::FolderCalls& calls) {
  comm::Collectives& collectives = engine.collectives();
  agree_on_tag(collectives, request.tag);
  agree_after(collectives, kSavingTraining, [&] {
    engine.require_intact_weights();
    engine.state_offload().require_all("saving a checkpoint");
    format::require_tag(request.tag);
    if (collectives.rank() == 0) job.checkpoint.emplace(request.folder, request.tag, calls);
  });
  job.request = request;
  job.rank = static_cast<std::size_t>(collectives.rank());
  job.ranks = static_cast<std::size_t>(collectives.world_size());
  job.stage = engine.options().stage;
  job.folder = collectives.all_gather_text(job.checkpoint ? job.checkpoint->staging() : "").front();
  job.saved = plan_together(engine, states, request.content);
  require_room(collectives, job.saved, job.folder, calls);
}

std::string part_path(const SaveJob& job, std::size_t rank) {
  return fmt::format("{}/.part-{}", job.folder, rank);
}

// This rank's files are written: adds rank 0's texts, and tells rank 0, which looks for a file
// that is complete under its name.
void tell_part(SaveJob& job, checkpoint::FileWriter& writer, io::IoEngine& io,
               io::FolderCalls& calls) {
  if (job.checkpoint) {
    for (const auto& [name, text] : job.request.texts) job.checkpoint->write_text(name, text, io);
  }
  const std::string path = part_path(job, job.rank);
  {
    const std::string text = to_text(writer.finish(job.saved.kinds));
    io::File file = calls.create(path + ".new");
    io.write(file, Bytes(), std::as_bytes(std::span(text)))->wait();
  }
  calls.rename(path + ".new", path);
}

// On rank 0. `wait`: called while a part is not there; throws where it will not come.
void publish(SaveJob& job, io::IoEngine& io, io::FolderCalls& calls,
             const std::function<void()>& wait) {
  format::Manifest manifest;
  manifest.tag = job.request.tag;
  manifest.world_size = static_cast<int>(job.ranks);
  manifest.stage = job.stage;
  manifest.training = job.request.training;
  manifest.kinds = std::move(job.saved.kinds);
  manifest.tensors = std::move(job.saved.tensors);
  for (std::size_t rank = 0; rank < job.ranks; ++rank) {
    const std::string path = part_path(job, rank);
    while (!std::filesystem::exists(path)) wait();
    const io::File file(path, io::File::Mode::kRead);
    std::string text(file.size().size(), '\0');
    io.read(file, Bytes(), std::as_writable_bytes(std::span(text)))->wait();
    append(manifest, format::parse_manifest_part(text));
  }
  for (std::size_t rank = 0; rank < job.ranks; ++rank) calls.remove_tree(part_path(job, rank));
  job.checkpoint->publish(manifest, job.request.publish, io);
}

// A file that the copy holds already.
class ImageSource final : public checkpoint::WholeFile {
 public:
  using WholeFile::WholeFile;
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece&, std::span<std::byte>) override {
    return nullptr;
  }
};

Bytes room_of(const ShardFile& file) {
  return align_up(file.layout.bytes(), 4_KiB);
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

void save_training(Engine& engine, const SaveRequest& request, io::IoEngine& io,
                   io::FolderCalls& calls, const checkpoint::RingOptions& staging) {
  comm::Collectives& collectives = engine.collectives();
  engine.finish_step();  // what it has left to say is better said before a checkpoint
  SaveJob job;
  ShardStates states(engine);
  begin_save(job, engine, states, request, calls);
  const std::vector<const checkpoint::FileLayout*> layouts = job.saved.layouts();
  std::optional<checkpoint::FileWriter> writer;
  agree_after(collectives, kSavingTraining,
              [&] { writer.emplace(job.folder, layouts, io, calls); });
  agree_after(collectives, kSavingTraining, [&] {
    if (!layouts.empty()) {
      checkpoint::TransferRing ring(
          {staging.buffers, checkpoint::blocks_of(staging.buffer_bytes, layouts)}, engine.device());
      for (const ShardFile& file : job.saved.files) {
        ShardFileSource source(file, states, engine.device(), ring.buffer_bytes());
        writer->write(source, ring);
      }
    }
    tell_part(job, *writer, io, calls);
  });
  agree_after(collectives, kSavingTraining, [&] {
    if (job.checkpoint)
      publish(job, io, calls, [] { throw IoError("another rank has not written its part"); });
  });
}

struct AsyncSaver::Job : SaveJob {
  std::vector<std::span<std::byte>> images;  // of the files
  std::promise<void> written;                // this rank's files
  std::promise<void> published;              // of rank 0
  std::atomic<bool> ended = false;           // the writing of these files
  std::atomic<bool> give_up = false;         // a rank has failed
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
      job_->give_up = std::chrono::steady_clock::now() > last || !is_usable(engine_.collectives());
  }
  writer_.join();
}

Bytes copied_bytes(Engine& engine, Bytes more) {
  const ShardStates states(engine);
  const std::vector<std::string> kinds = kinds_of(engine, states, {});
  Bytes bytes = more;
  for (const ShardFile& file : plan_saved_shards(engine, states, {}, kinds).files)
    bytes += room_of(file);
  return align_up(bytes, kCopyGranule);
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
  auto job = std::make_unique<Job>();
  {
    ShardStates states(engine_);
    begin_save(*job, engine_, states, request, *calls_);
    agree_after(engine_.collectives(), kSavingAsync, [&] { copy_shards(*job, states); });
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
    // Expected memory that is not taken stays: a larger copy takes its place.
    if (first && expected_ < bytes && expected_.value > 0)
      device.expect_host(bytes, memory::Kind::kStaging);
    copy_ = device.allocate_host(std::max(bytes, expected_), memory::Kind::kStaging);
  }
  Bytes at;
  for (const ShardFile& file : job.saved.files) {
    const auto image = copy_->bytes().subspan(at.size(), file.layout.bytes().size());
    checkpoint::TransferRing ring(image, kImagePiece);
    ShardFileSource source(file, states, device, kImagePiece);
    checkpoint::Discard sink;
    copy(source, sink, ring);
    job.images.push_back(image);
    at += room_of(file);
  }
}

void AsyncSaver::write_and_publish(Job& job) {
  try {
    const std::vector<const checkpoint::FileLayout*> layouts = job.saved.layouts();
    const Bytes piece = checkpoint::blocks_of(kImagePiece, layouts);
    checkpoint::FileWriter writer(job.folder, layouts, *io_, *calls_);
    for (const std::span<std::byte> image : job.images) {
      checkpoint::TransferRing ring(image, piece);
      ImageSource source(Bytes(image.size()), piece);
      writer.write(source, ring);
    }
    tell_part(job, writer, *io_, *calls_);
    job.written.set_value();
  } catch (...) {
    job.written.set_exception(std::current_exception());
  }
  job.ended = true;
  if (job.rank != 0) return;
  try {
    publish(job, *io_, *calls_, [&] {
      if (job.give_up) throw IoError("another rank has not written its part");
      std::this_thread::sleep_for(kLook);
    });
    job.published.set_value();
  } catch (...) {
    job.published.set_exception(std::current_exception());
  }
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
    agree_on_outcome(engine_.collectives(), kSavingAsync, mine);
  } catch (const Error&) {
    job_->give_up = true;
    writer_.join();
    job_.reset();  // rank 0 takes away what was written
    throw;
  }
  writer_.join();
  const std::unique_ptr<Job> job = std::move(job_);
  agree_after(engine_.collectives(), kSavingAsync, [&] {
    if (job->rank == 0) job->published.get_future().get();
  });
}

}  // namespace strata::engine
