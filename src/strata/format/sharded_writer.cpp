#include "strata/format/sharded_writer.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/other_weights.h"
#include "strata/io/atomic_file.h"

namespace strata::format {
namespace {

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || !std::filesystem::is_directory(folder, error)) {
    throw IoError(
        fmt::format("cannot make a folder: path={} {}", folder, errno_text(error.value())));
  }
}

}  // namespace

ShardedWriter::ShardedWriter(std::string folder, std::vector<TensorSpec> tensors,
                             io::IoEngine& engine, const ShardedWriterOptions& options)
    : folder_(std::move(folder)),
      tensors_(std::move(tensors)),
      plan_(plan_shards(tensors_, options.shard_max)),
      places_(tensors_.size()) {
  std::set<std::string_view> names;
  for (const TensorSpec& tensor : tensors_) {
    if (!names.insert(tensor.name).second) {
      throw UsageError(
          fmt::format("a checkpoint cannot hold two tensors of one name: tensor={}", tensor.name));
    }
  }
  make_folder(folder_);
  for (std::size_t file = 0; file < plan_.files.size(); ++file) {
    std::vector<TensorSpec> members;
    for (const std::size_t tensor : plan_.tensors[file]) {
      places_[tensor] = Place{file, members.size()};
      members.push_back(tensors_[tensor]);
    }
    writers_.emplace_back(in_folder(plan_.files[file]), members, options.metadata, engine);
  }
}

std::unique_ptr<io::Transfer> ShardedWriter::write(std::size_t tensor, Bytes offset,
                                                   std::span<const std::byte> source) {
  STRATA_ASSERT(tensor < places_.size());
  const Place& place = places_[tensor];
  return writers_[place.file].write(place.index, offset, source);
}

void ShardedWriter::finish() {
  for (SafetensorsWriter& writer : writers_) writer.seal();
  retire_index_of_overwritten_shards();
  for (SafetensorsWriter& writer : writers_) writer.publish();
  if (plan_.sharded()) publish_index();
  remove_leftovers();
}

void ShardedWriter::retire_index_of_overwritten_shards() const {
  if (!plan_.sharded()) return;
  const bool overwrites = std::any_of(
      plan_.files.begin(), plan_.files.end(),
      [this](const std::string& name) { return std::filesystem::exists(in_folder(name)); });
  if (overwrites) io::remove_file(in_folder(kIndexFileName));
}

void ShardedWriter::publish_index() const {
  nlohmann::json index;
  index["metadata"]["total_size"] = plan_.total.value;
  nlohmann::json& map = index["weight_map"];
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    map[tensors_[i].name] = plan_.files[places_[i].file];
  }
  io::write_file_atomically(in_folder(kIndexFileName), index.dump(2) + "\n");
}

// A model.safetensors beside an index would be loaded in its place, so this is part of the save.
void ShardedWriter::remove_leftovers() const {
  std::set<std::string> ours(plan_.files.begin(), plan_.files.end());
  if (plan_.sharded()) ours.insert(kIndexFileName);
  remove_other_weights(folder_, ours);
}

}  // namespace strata::format
