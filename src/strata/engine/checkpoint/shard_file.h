// One file of a checkpoint as it will be: which bytes lie where, and where they come from. A plan,
// of which any range can be filled, so that a writer may go through it in buffers of its own.
//
// Threads: one. Ownership: borrows what the parts refer to. Errors: UsageError for names that no
// safetensors file can hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "strata/engine/checkpoint/shard_states.h"
#include "strata/format/manifest.h"
#include "strata/format/tensor_info.h"

namespace strata::engine {

// Elements of a unit's shard, of a kind.
struct ShardRun {
  int unit = 0;
  Numel first;
};

// Elements [begin, end) of a tensor of the manifest.
struct FilePart {
  std::size_t tensor = 0;
  std::string name;  // of the tensor
  std::string kind;
  DType dtype = DType::kFloat32;
  Numel begin;
  Numel end;
  std::variant<ShardRun, const std::byte*> source;  // memory: of the host or the device
};

class ShardFile {
 public:
  ShardFile(std::string name, std::vector<FilePart> parts);

  const std::string& name() const { return name_; }
  Bytes bytes() const { return layout_bytes_; }
  // In the order of the file. Numbers of kinds are places in `kinds`; the file's is to be set.
  std::vector<format::ManifestExtent> extents(std::span<const std::string> kinds) const;

  // Queues on the compute stream what fills `target`, host memory for transfers, with the file's
  // bytes from `offset` on. It is complete when the stream has come so far.
  void enqueue_fill(Bytes offset, std::span<std::byte> target, ShardStates& states,
                    device::Device& device) const;

 private:
  void fill_part(const FilePart& part, Bytes at, Bytes until, std::span<std::byte> target,
                 ShardStates& states, device::Device& device) const;

  std::string name_;
  std::string head_;
  Bytes layout_bytes_;
  std::vector<FilePart> parts_;  // by offset
  std::vector<Bytes> offsets_;   // of the parts
};

}  // namespace strata::engine
