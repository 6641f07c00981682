#include "strata/engine/checkpoint/training_saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/message_text.h"

namespace strata::engine {
namespace {

constexpr std::string_view kSavingTraining = "saving the checkpoint";

void require_same_tag(comm::Collectives& collectives, const std::string& tag) {
  const std::vector<std::string> tags = collectives.all_gather_text(tag);
  for (std::size_t rank = 1; rank < tags.size(); ++rank) {
    if (tags[rank] == tags[0]) continue;
    throw UsageError(fmt::format(
        "the ranks name different tags for one checkpoint; give the same on every rank; rank 0 has "
        "{}, rank {} has {}",
        format::in_quotes(tags[0]), rank, format::in_quotes(tags[rank])));
  }
}

// A file from its first byte on, in pieces of one buffer.
class FileSource final : public checkpoint::Source {
 public:
  FileSource(const ShardFile& file, ShardStates& states, device::Device& device, Bytes piece)
      : file_(file), states_(states), device_(device), most_(piece) {}

  bool next(checkpoint::Piece& piece) override {
    piece.offset = at_;
    piece.bytes = std::min(most_, file_.bytes() - at_);
    at_ += piece.bytes;
    return piece.bytes > Bytes();
  }
  device::Stream* stream() override { return &device_.compute_stream(); }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    file_.enqueue_fill(piece.offset, piece.content, states_, device_);
    return nullptr;
  }

 private:
  const ShardFile& file_;
  ShardStates& states_;
  device::Device& device_;
  Bytes most_;
  Bytes at_;
};

class BlockSink final : public checkpoint::Sink {
 public:
  explicit BlockSink(format::BlockWriter& writer) : writer_(writer) {}
  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    return writer_.write(piece.content);
  }

 private:
  format::BlockWriter& writer_;
};

format::ManifestFile write_file(const ShardFile& file, format::BlockWriter& writer,
                                ShardStates& states, device::Device& device,
                                checkpoint::TransferRing& ring) {
  STRATA_ASSERT(ring.buffer_bytes() % writer.block() == Bytes());
  FileSource source(file, states, device, ring.buffer_bytes());
  BlockSink sink(writer);
  copy(source, sink, ring, {.taking = ring.size() / 2});
  return writer.finish();
}

// Blocks of checksums divide a buffer.
checkpoint::RingOptions for_blocks(checkpoint::RingOptions staging,
                                   std::span<const ShardFile> files) {
  for (const ShardFile& file : files) {
    const Bytes block = format::BlockChecksums::block_for(file.bytes());
    staging.buffer_bytes = align_up(staging.buffer_bytes, block);
  }
  return staging;
}

}  // namespace

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

void require_room(comm::Collectives& collectives, const SavedShards& saved,
                  const std::string& folder, io::FolderCalls& calls) {
  Bytes mine;
  for (const ShardFile& file : saved.files) mine += file.bytes();
  const std::vector<std::string> texts = collectives.all_gather_text(std::to_string(mine.value));
  together(collectives, kSavingTraining, [&] {
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

std::deque<format::BlockWriter> make_files(const SavedShards& saved, const std::string& folder,
                                           io::IoEngine& io, io::FolderCalls& calls) {
  std::deque<format::BlockWriter> writers;
  for (const ShardFile& file : saved.files)
    writers.emplace_back(folder, file.name(), file.bytes(), io, calls);
  return writers;
}

format::Manifest manifest_of(const SaveRequest& request, SavedShards saved, int stage,
                             std::span<const std::string> parts) {
  format::Manifest manifest;
  manifest.tag = request.tag;
  manifest.world_size = static_cast<int>(parts.size());
  manifest.stage = stage;
  manifest.training = request.training;
  manifest.kinds = std::move(saved.kinds);
  manifest.tensors = std::move(saved.tensors);
  for (const std::string& text : parts) {
    if (!text.empty()) append(manifest, format::parse_manifest_part(text));
  }
  return manifest;
}

void begin_save(Engine& engine, const SaveRequest& request, io::FolderCalls& calls,
                std::optional<format::NewCheckpoint>& checkpoint) {
  comm::Collectives& collectives = engine.collectives();
  engine.settle_step();  // what it has left to say is better said before a checkpoint
  require_same_tag(collectives, request.tag);
  together(collectives, kSavingTraining, [&] {
    engine.require_intact_weights();
    engine.parking().require_all("saving a checkpoint");
    format::require_tag(request.tag);
    if (collectives.rank() == 0) checkpoint.emplace(request.folder, request.tag, calls);
  });
}

void save_training(Engine& engine, const SaveRequest& request, io::IoEngine& io,
                   io::FolderCalls& calls, const checkpoint::RingOptions& staging) {
  comm::Collectives& collectives = engine.collectives();
  std::optional<format::NewCheckpoint> checkpoint;  // of rank 0
  begin_save(engine, request, calls, checkpoint);
  const std::string folder =
      collectives.all_gather_text(checkpoint ? checkpoint->staging() : std::string()).front();
  ShardStates states(engine);
  SavedShards saved = plan_together(engine, states, request.content);
  require_room(collectives, saved, folder, calls);
  std::deque<format::BlockWriter> writers;
  together(collectives, kSavingTraining, [&] { writers = make_files(saved, folder, io, calls); });
  std::string part;
  together(collectives, kSavingTraining, [&] {
    if (checkpoint) {
      for (const auto& [name, text] : request.texts) checkpoint->write_text(name, text, io);
    }
    if (saved.files.empty()) return;
    checkpoint::TransferRing ring(for_blocks(staging, saved.files), engine.device());
    format::ManifestPart written;
    for (const ShardFile& file : saved.files) {
      for (format::ManifestExtent& extent : file.extents(saved.kinds)) {
        extent.file = written.files.size();
        written.extents.push_back(extent);
      }
      written.files.push_back(write_file(file, writers.front(), states, engine.device(), ring));
      writers.pop_front();
    }
    part = to_text(written);
  });
  const std::vector<std::string> parts = collectives.all_gather_text(part);
  together(collectives, kSavingTraining, [&] {
    if (!checkpoint) return;
    checkpoint->publish(manifest_of(request, std::move(saved), engine.options().stage, parts),
                        request.publish, io);
  });
}

}  // namespace strata::engine
