#include "strata/engine/checkpoint/shard_states.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/kernels/master_remainder.h"
#include "strata/kernels/states8.h"

namespace strata::engine {
namespace {

constexpr Bytes kScratchBytes = 4_MiB;

using format::kValue;

}  // namespace

ShardStates::ShardStates(Engine& engine)
    : engine_(engine), native_(dynamic_cast<NativeOptimizer*>(engine.optimizer())) {}

ShardStates::~ShardStates() {
  try {
    if (scratch_ != nullptr) settle();
  } catch (const Error&) {
    // The device has failed; the next wait for its work says so.
  }
}

void ShardStates::settle() {
  engine_.device().compute_stream().synchronize();
}

DType ShardStates::dtype_of(int unit, std::string_view kind) const {
  if (format::elements_each(kind) > 1) return DType::kFloat32;
  if (kind != kValue) return native_->states().dtype(unit);
  const Weights& weights = engine_.weights();
  const DType dtype = nth(weights.units(), unit).layout.dtype();
  const plan::MasterForm form = weights.master_form(unit);
  const bool beside = form == plan::MasterForm::kFloat32 || form == plan::MasterForm::kRemainder;
  return beside && dtype != DType::kFloat64 ? DType::kFloat32 : dtype;
}

std::string_view ShardStates::scales_of(std::string_view state) {
  return state == kExpAvg ? "exp_avg.scales" : "exp_avg_sq.scales";
}

StateBlock ShardStates::block_of(int unit, std::string_view kind) const {
  if (format::elements_each(kind) == 1) return native_->states().block(unit, kind);
  kind.remove_suffix(format::kScales.size());
  return native_->states().scales(unit, kind);
}

namespace {

// Numbers [begin, end) of the shard's, which a range of elements holds, of a block whose numbers
// are of `each` elements.
struct Numbers {
  Numel begin;
  Numel end;
  std::span<std::byte> bytes;

  Numbers(const StateRange& range, DType dtype, std::int64_t each)
      : begin(range.low / each),
        end((range.high.value + each - 1) / each),
        bytes(range.bytes(0).subspan(bytes_of(begin - Numel(range.first / each), dtype).size(),
                                     bytes_of(end - begin, dtype).size())) {}
};

}  // namespace

void ShardStates::enqueue_read(int unit, std::string_view kind, Numel first, Numel numel,
                               std::span<std::byte> target) {
  Weights& weights = engine_.weights();
  const Unit& of = nth(weights.units(), unit);
  const DType dtype = dtype_of(unit, kind);
  STRATA_ASSERT(Bytes(target.size()) == bytes_of(numel, dtype));
  device::Device& device = engine_.device();
  if (kind == kValue && dtype == of.layout.dtype()) {
    weights.shards().for_each(
        unit, first, first + numel, offload::Access::kRead, device.compute_stream(),
        [&](const WeightShards::Piece& piece) {
          device.copy(
              target.subspan(bytes_of(piece.begin - first, dtype).size(), piece.bytes.size()),
              piece.bytes, device.compute_stream());
        });
    return;
  }
  if (kind == kValue && (weights.master_form(unit) == plan::MasterForm::kRemainder || of.whole)) {
    read_masters(of, first, numel, target);
    return;
  }
  const auto copy = [&](const StateRange& range) {
    const std::span<std::byte> source = range.wanted(dtype);
    device.copy(target.subspan(bytes_of(range.low - first, dtype).size(), source.size()), source,
                device.compute_stream());
  };
  if (kind == kValue) {
    weights.masters().for_each(unit, first, first + numel, offload::Access::kRead, copy);
    return;
  }
  const StateBlock block = block_of(unit, kind);
  const std::int64_t each = format::elements_each(kind);
  const Numel shard = of.layout.shard();
  for_each_range(
      weights.states(), {&block, 1}, shard, first * each, std::min((first + numel) * each, shard),
      offload::Access::kRead, [&](const StateRange& range) {
        const Numbers found(range, dtype, each);
        device.copy(target.subspan(bytes_of(found.begin - first, dtype).size(), found.bytes.size()),
                    found.bytes, device.compute_stream());
      });
}

// fp32 masters, to which weights contribute: what these lack is kept beside them, or a script may
// have written them.
void ShardStates::read_masters(const Unit& unit, Numel first, Numel numel,
                               std::span<std::byte> target) {
  Weights& weights = engine_.weights();
  device::Device& device = engine_.device();
  device::Stream& stream = device.compute_stream();
  const bool reached = device.device_accessible(target.data());
  const bool joins = weights.master_form(unit.id) == plan::MasterForm::kRemainder;
  // `at`: of the range's elements the first one. Remainders begin at multiples of 8 elements.
  const auto join = [&](const StateRange& range, Numel at, std::span<std::byte> there) {
    const Numel begin = range.first + at;
    const Numel end = begin + Numel(static_cast<std::int64_t>(there.size() / sizeof(float)));
    if (!joins) {
      const std::size_t from = bytes_of(at, DType::kFloat32).size();
      device.copy(there, range.bytes(0).subspan(from, there.size()), stream);
    }
    const auto join_piece = [&](const WeightShards::Piece& piece) {
      const Numel low = std::max(begin, piece.begin);
      auto* const values = reinterpret_cast<float*>(there.data()) + (low - begin).size();
      if (!joins) {
        const std::byte* const from =
            piece.bytes.data() + bytes_of(low - piece.begin, unit.layout.dtype()).size();
        device.adopt_written({values, (piece.end - low).size()}, from, unit.layout.dtype(), stream);
        return;
      }
      const auto remainder =
          MasterStates::remainder_in(range).from((piece.begin - range.first).size());
      device.join_masters({values, (piece.end - low).size()}, piece.bytes.data(), remainder,
                          low - piece.begin, stream);
    };
    weights.shards().for_each(unit.id, begin - Numel(at.value % 8), end, offload::Access::kRead,
                              device.compute_stream(), join_piece);
  };
  weights.masters().for_each(
      unit.id, first, first + numel, offload::Access::kRead, [&](const StateRange& range) {
        const Numel at = range.low - range.first;
        const Numel count = range.high - range.low;
        const auto out = target.subspan(bytes_of(range.low - first, DType::kFloat32).size(),
                                        bytes_of(count, DType::kFloat32).size());
        if (reached) return join(range, at, out);
        through_scratch(count, DType::kFloat32, [&](Numel done, Numel, std::span<std::byte> there) {
          join(range, at + done, there);
          device.copy(out.subspan(bytes_of(done, DType::kFloat32).size(), there.size()), there,
                      stream);
        });
      });
}

void ShardStates::enqueue_store(int param, std::string_view kind, Numel begin, Numel numel,
                                const std::byte* source, DType source_dtype) {
  Weights& weights = engine_.weights();
  if (kind == kValue) {
    weights.enqueue_store(param, begin, numel, source, source_dtype);
    return;
  }
  const std::int64_t each = format::elements_each(kind);
  const auto [owned_begin, owned_end] = weights.owned_range(param);
  const Numel low = std::max(begin, Numel(owned_begin / each));
  const Numel high = std::min(begin + numel, format::numel_of(kind, owned_end));
  if (low >= high) return;
  const Unit& unit = weights.unit_of(param);
  const Numel shard = unit.layout.shard();
  const Numel shard_begin = shard * engine_.collectives().shard_position().index;
  const Numel at = weights.slot_of(param).offset + low * each - shard_begin;
  const std::byte* first = source + bytes_of(low - begin, source_dtype).size();
  const DType dtype = dtype_of(unit.id, kind);
  const StateBlock block = block_of(unit.id, kind);
  for_each_range(weights.states(), {&block, 1}, shard, at,
                 std::min(at + (high - low) * each, shard), offload::Access::kReadWrite,
                 [&](const StateRange& range) {
                   const Numbers found(range, dtype, each);
                   write(found.bytes.data(), dtype,
                         first + bytes_of(found.begin - Numel(at / each), source_dtype).size(),
                         source_dtype, found.end - found.begin);
                 });
  if (dtype == DType::kUInt8 && kind == kExpAvg && high == owned_end)
    fill_last_block(unit, block, at + (high - low));
}

// Kernels update the rest of a parameter's last block with the parameter, and zeroes have to stay
// zeroes there: code 0 of the signed map is nearly minus the block's scale.
void ShardStates::fill_last_block(const Unit& unit, const StateBlock& block, Numel end) {
  static const std::vector<std::byte> zeroes(kernels::kBlock8,
                                             static_cast<std::byte>(kernels::signed_map8().zero));
  const Numel shard = unit.layout.shard();
  for_each_range(engine_.weights().states(), {&block, 1}, shard, end,
                 std::min(align_up(end, Numel(plan::kBlock8)), shard), offload::Access::kReadWrite,
                 [&](const StateRange& range) {
                   const std::span<std::byte> rest = range.wanted(DType::kUInt8);
                   engine_.device().copy(rest, std::span(zeroes).first(rest.size()),
                                         engine_.device().compute_stream());
                 });
}

void ShardStates::write(std::byte* target, DType dtype, const std::byte* source, DType source_dtype,
                        Numel count) {
  device::Device& device = engine_.device();
  device::Stream& stream = device.compute_stream();
  if (source_dtype == dtype) {
    const std::size_t bytes = bytes_of(count, dtype).size();
    device.copy({target, bytes}, {source, bytes}, stream);
    return;
  }
  if (device.device_accessible(source)) {
    device.cast(target, dtype, source, source_dtype, count, stream);
    return;
  }
  through_scratch(count, source_dtype, [&](Numel done, Numel part, std::span<std::byte> there) {
    device.copy(there, {source + bytes_of(done, source_dtype).size(), there.size()}, stream);
    device.cast(target + bytes_of(done, dtype).size(), dtype, there.data(), source_dtype, part,
                stream);
  });
}

// In order on the compute stream, so that one scratch serves all pieces.
void ShardStates::through_scratch(
    Numel numel, DType dtype,
    const std::function<void(Numel done, Numel part, std::span<std::byte> scratch)>& queue) {
  if (scratch_ == nullptr)
    scratch_ = engine_.device().allocate(kScratchBytes, memory::Kind::kStaging);
  const Numel most(kScratchBytes / size_of(dtype));
  for (Numel done; done < numel; done += most) {
    const Numel part = std::min(most, numel - done);
    queue(done, part, scratch_->bytes().first(bytes_of(part, dtype).size()));
  }
}

}  // namespace strata::engine
