#include "strata/torch/start/host_export.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

#include "strata/memory/host_buffer.h"

namespace strata::torch {
namespace {

// Targets are new memory, whose pages come as they are first written: parts and buffers are larger
// than on other ways, so that many threads are given pages at once, and few of them the same huge
// one.
constexpr engine::StagingOptions kRing{4, 16_MiB};
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
  device::Device& device = engine_.device();
  while (!source.empty()) {
    if (!buffer_.empty() && used_ >= Bytes(buffer_.size())) close();
    if (buffer_.empty()) {
      if (under_way_.size() == ring_.size()) empty_oldest();
      buffer_ = ring_.buffer(turn_);
    }
    const std::size_t count = std::min(source.size(), buffer_.size() - used_.size());
    const std::span<std::byte> here = buffer_.subspan(used_.size(), count);
    device.copy(here, source.first(count), device.compute_stream());
    for (std::size_t at = 0; at < count; at += kPart.size()) {
      const std::size_t part = std::min(kPart.size(), count - at);
      parts_.push_back({target.subspan(at, part), here.data() + at});
    }
    used_ = align_up(used_ + Bytes(count), kSourceAlignment);
    target = target.subspan(count);
    source = source.subspan(count);
  }
}

void HostExport::close() {
  under_way_.push_back({std::move(parts_), engine_.device().compute_stream().record()});
  parts_.clear();
  ++turn_;
  buffer_ = {};
  used_ = Bytes();
}

void HostExport::empty_oldest() {
  Turn turn = std::move(under_way_.front());
  under_way_.pop_front();
  turn.arrived->wait();
  threads_.parallel_for(static_cast<std::int64_t>(turn.parts.size()), 1,
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t i = begin; i < end; ++i) {
                            const Part& part = turn.parts[static_cast<std::size_t>(i)];
                            std::memcpy(part.target.data(), part.source, part.target.size());
                          }
                        });
  for (const Part& part : turn.parts) phase_.moved(Bytes(part.target.size()));
}

void HostExport::flush() {
  if (!parts_.empty()) close();
  while (!under_way_.empty()) empty_oldest();
}

}  // namespace strata::torch
