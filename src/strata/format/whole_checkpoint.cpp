#include "strata/format/whole_checkpoint.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "strata/base/error.h"
#include "strata/format/block_writer.h"
#include "strata/format/message_text.h"
#include "strata/format/safetensors_layout.h"

namespace strata::format {
namespace {

constexpr Bytes kBufferBytes = 4_MiB;

// As the files of one rank's shards name their tensors.
std::string name_in_file(const ManifestTensor& tensor, std::string_view kind) {
  if (kind != kValue) return fmt::format("{}:{}", kind, tensor.name);
  if (tensor.role == TensorRole::kParameter) return tensor.name;
  return fmt::format("{}:{}", name_of(tensor.role), tensor.name);
}

const std::string& checked_tag(const std::string& tag) {
  require_tag(tag);
  return tag;
}

}  // namespace

// A file that is filled from its first byte on, by any number of bytes at a time.
class WholeCheckpointWriter::File {
 public:
  File(const std::string& folder, std::string name, const SafetensorsLayout& layout,
       std::size_t pieces, io::IoEngine& io, io::FolderCalls& calls)
      : pieces_left(pieces), writer_(folder, std::move(name), layout.file_bytes, io, calls) {
    for (Buffer& buffer : buffers_)
      buffer.bytes.resize(align_up(kBufferBytes, writer_.block()).size());
    append(std::as_bytes(std::span(layout.head)));
  }

  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      Buffer& buffer = buffers_[turn_];
      if (filled_ == 0) buffer.wait();
      const std::size_t count = std::min(bytes.size(), buffer.bytes.size() - filled_);
      std::copy_n(bytes.begin(), count,
                  buffer.bytes.begin() + static_cast<std::ptrdiff_t>(filled_));
      filled_ += count;
      bytes = bytes.subspan(count);
      if (filled_ == buffer.bytes.size()) send();
    }
  }

  ManifestFile finish() {
    if (filled_ > 0) send();
    for (Buffer& buffer : buffers_) buffer.wait();
    for (Buffer& buffer : buffers_) buffer.bytes = {};
    return writer_.finish();
  }

  std::size_t pieces_left;

 private:
  struct Buffer {
    std::vector<std::byte> bytes;
    std::unique_ptr<io::Transfer> transfer;  // last: ends before the bytes go

    void wait() {
      if (transfer != nullptr) transfer->wait();
      transfer.reset();
    }
  };

  void send() {
    Buffer& buffer = buffers_[turn_];
    buffer.transfer = writer_.write(std::span(buffer.bytes).first(filled_));
    turn_ = 1 - turn_;
    filled_ = 0;
  }

  BlockWriter writer_;
  std::array<Buffer, 2> buffers_;
  std::size_t turn_ = 0;
  std::size_t filled_ = 0;  // of the buffer whose turn it is
};

WholeCheckpointWriter::WholeCheckpointWriter(std::string folder, std::string tag,
                                             std::vector<WholeTensor> tensors, io::IoEngine& io,
                                             io::FolderCalls& calls)
    : tensors_(std::move(tensors)),
      io_(io),
      calls_(calls),
      checkpoint_(std::move(folder), checked_tag(tag), calls) {
  manifest_.tag = std::move(tag);
  manifest_.kinds = {std::string(kValue)};
  for (const WholeTensor& tensor : tensors_) {
    STRATA_ASSERT(!tensor.kinds.empty() && tensor.kinds.front().first == kValue);
    manifest_.tensors.push_back(tensor.tensor);
    for (const auto& [kind, dtype] : tensor.kinds) {
      if (std::ranges::find(manifest_.kinds, kind) == manifest_.kinds.end())
        manifest_.kinds.push_back(kind);
    }
  }
  plan("model-00000-of-00001.safetensors", /*values=*/true);
  plan("optimizer-00000-of-00001.safetensors", /*values=*/false);
}

WholeCheckpointWriter::~WholeCheckpointWriter() = default;

void WholeCheckpointWriter::plan(std::string name, bool values) {
  std::vector<TensorSpec> specs;
  std::vector<WholePiece> pieces;
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    const WholeTensor& tensor = tensors_[t];
    for (std::size_t k = 0; k < tensor.kinds.size(); ++k) {
      const auto& [kind, dtype] = tensor.kinds[k];
      if ((kind == kValue) != values) continue;
      if (checked_numel(tensor.tensor.shape) == Numel()) continue;
      specs.push_back({name_in_file(tensor.tensor, kind), dtype, tensor.tensor.shape});
      pieces.push_back({t, k, Bytes()});
    }
  }
  if (specs.empty()) return;
  const SafetensorsLayout layout = lay_out_safetensors(specs, {{"format", "strata-checkpoint"}});
  std::vector<std::size_t> by_offset(specs.size());
  std::iota(by_offset.begin(), by_offset.end(), std::size_t{0});
  std::ranges::sort(by_offset, {}, [&](std::size_t i) { return layout.tensors[i].offset; });
  for (const std::size_t i : by_offset) {
    const TensorInfo& info = layout.tensors[i];
    WholePiece& piece = pieces[i];
    piece.bytes = info.bytes;
    order_.push_back(piece);
    const auto kind =
        std::ranges::find(manifest_.kinds, tensors_[piece.tensor].kinds[piece.kind].first);
    manifest_.extents.push_back({piece.tensor,
                                 static_cast<std::size_t>(kind - manifest_.kinds.begin()),
                                 info.dtype, files_.size(), info.offset, Numel(), info.numel});
  }
  files_.push_back(std::make_unique<File>(checkpoint_.staging(), std::move(name), layout,
                                          pieces.size(), io_, calls_));
}

void WholeCheckpointWriter::write(std::span<const std::byte> bytes) {
  if (next_ == order_.size())
    throw UsageError("all tensors of the checkpoint are written; publish it");
  const WholePiece& piece = order_[next_];
  if (Bytes(bytes.size()) != piece.bytes) {
    const WholeTensor& tensor = tensors_[piece.tensor];
    throw UsageError(fmt::format(
        "a tensor has another size than was declared: tensor={} ({}) wanted={} found={}",
        in_quotes(tensor.tensor.name), tensor.kinds[piece.kind].first, piece.bytes.value,
        bytes.size()));
  }
  ++next_;
  File& file = *files_[file_];
  file.append(bytes);
  if (--file.pieces_left > 0) return;
  manifest_.files.push_back(file.finish());
  files_[file_++].reset();
}

void WholeCheckpointWriter::write_text(const std::string& name, std::string_view text) {
  checkpoint_.write_text(name, text, io_);
}

void WholeCheckpointWriter::publish(const Description& description) {
  if (next_ != order_.size()) {
    throw UsageError(fmt::format("{} of {} pieces of the checkpoint are still to be written",
                                 order_.size() - next_, order_.size()));
  }
  manifest_.training = description.training;
  manifest_.world_size = description.world_size;
  manifest_.stage = description.stage;
  checkpoint_.publish(manifest_, description.publish, io_);
}

}  // namespace strata::format
