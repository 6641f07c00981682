#include "strata/torch/start/host_export.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "strata/memory/host_buffer.h"

namespace strata::torch {
namespace {

// Targets are new memory, whose pages the system allocates at the first write. Parts and buffers
// are larger than for other copies, so that many threads touch new pages at once and few of them
// the same huge page.
constexpr checkpoint::RingOptions kRing{4, 16_MiB};
constexpr Bytes kPart = 1_MiB;             // that one thread copies
constexpr Bytes kSourceAlignment = 256_B;  // of a source in a buffer

}  // namespace

at::Tensor empty_on_host(const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(like.scalar_type());
  const Bytes bytes(like.nbytes());
  if (bytes < memory::kHugePageSize) return at::empty(like.sizes(), options);
  auto memory = std::make_shared<memory::HostBuffer>(bytes);
  void* const data = memory->data();
  return at::from_blob(
      data, like.sizes(), [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

HostExport::HostExport(engine::Engine& engine, ThreadPool& threads,
                       engine::InitReport::Phase& phase)
    : engine_(engine), threads_(threads), phase_(phase), ring_(kRing, engine.device()) {}

void HostExport::add(std::span<std::byte> target, std::span<const std::byte> source) {
  STRATA_ASSERT(target.size() == source.size());
  const std::size_t room = ring_.buffer_bytes().size();
  while (!source.empty()) {
    std::size_t at = room;  // no buffer is open
    if (!turns_.empty()) {
      const Part& last = turns_.back().back();
      at = align_up(Bytes(last.at + last.source.size()), kSourceAlignment).size();
    }
    if (at >= room) {
      turns_.emplace_back();
      at = 0;
    }
    const std::size_t count = std::min(source.size(), room - at);
    turns_.back().push_back({target.first(count), source.first(count), at});
    target = target.subspan(count);
    source = source.subspan(count);
  }
}

class HostExport::PartSource final : public checkpoint::Source {
 public:
  explicit PartSource(HostExport& way) : way_(way) {}

  bool next(checkpoint::Piece& piece) override {
    if (next_ == way_.turns_.size()) return false;
    const Part& last = way_.turns_[next_++].back();
    piece.bytes = Bytes(last.at + last.source.size());
    return true;
  }
  device::Stream* stream() override { return &way_.engine_.device().compute_stream(); }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    for (const Part& part : way_.turns_[piece.index])
      way_.engine_.device().copy(piece.content.subspan(part.at, part.source.size()), part.source,
                                 *stream());
    return nullptr;
  }

 private:
  HostExport& way_;
  std::size_t next_ = 0;
};

class HostExport::PartSink final : public checkpoint::Sink {
 public:
  explicit PartSink(HostExport& way) : way_(way) {}

  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    struct Copy {
      std::byte* target;
      const std::byte* source;
      std::size_t bytes;
    };
    std::vector<Copy> copies;
    for (const Part& part : way_.turns_[piece.index]) {
      const std::size_t all = part.target.size();
      for (std::size_t done = 0; done < all; done += kPart.size())
        copies.push_back({part.target.data() + done, piece.content.data() + part.at + done,
                          std::min(kPart.size(), all - done)});
      way_.phase_.moved(Bytes(all));
    }
    way_.threads_.parallel_for(static_cast<std::int64_t>(copies.size()), 1,
                               [&](std::int64_t begin, std::int64_t end) {
                                 for (auto i = begin; i < end; ++i) {
                                   const Copy& each = copies[static_cast<std::size_t>(i)];
                                   std::memcpy(each.target, each.source, each.bytes);
                                 }
                               });
    return nullptr;
  }

 private:
  HostExport& way_;
};

void HostExport::flush() {
  PartSource source(*this);
  PartSink sink(*this);
  copy(source, sink, ring_);
  turns_.clear();
}

}  // namespace strata::torch
