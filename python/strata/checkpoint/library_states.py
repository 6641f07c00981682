"""States of other libraries' optimizers, by the names and conventions of the engine: bitsandbytes' and torchao's in 8
bits, and those of the Muon of Moonlight and of dion. torch's, Keller Jordan's and DeepSpeed's have the engine's names.
The libraries need not be installed."""

import functools
import math

import torch

from .. import _C

BLOCK8 = 256  # elements that share a scale
NESTED = "__bnb_optimizer_quant_state__"  # a dict in which bitsandbytes hides its tensors from FSDP
_OF_BITSANDBYTES = {"1": "exp_avg", "2": "exp_avg_sq"}
_BESIDE = ("absmax1", "absmax2", "qmap1", "qmap2", "unorm_vec", "use_muon")


class Numbers:
    """fp32 numbers of one state: those of its codes in a map times the scale of each block, or other values times
    ``factor``. ``values`` and ``scales`` are tensors, or have ``dtype`` and ``read()``, which returns them."""

    dtype = torch.float32

    def __init__(self, values, scales=None, is_signed=True, block=BLOCK8, factor=1.0):
        self.values, self._scales, self._is_signed, self._block, self._factor = values, scales, is_signed, block, factor

    shape = property(lambda self: self.values.shape)
    is_coded = property(lambda self: self._scales is not None)

    def dim(self):
        return len(self.values.shape)

    def numel(self):
        return self.values.numel()

    def part(self, first, last):
        """Tensor of elements [first, last), in the order of the memory."""
        values = _in_memory(_read(self.values))[first:last]
        if self._scales is None:
            return values.float() * self._factor
        blocks = torch.arange(first, last).div_(self._block, rounding_mode="floor")
        return map8(self._is_signed)[values.int()] * _read(self._scales).float().flatten()[blocks]

    def read(self):
        """Tensor of all, with the shape and the order in memory of the values."""
        values = _read(self.values)
        flat = self.part(0, values.numel())
        return flat.as_strided(values.shape, values.stride()) if _is_dense(values) else flat.view(values.shape)


@functools.cache
def map8(is_signed):
    """Tensor [256]: the value of each code in the first moment's map, or in the second's."""
    return torch.tensor(_C.map8(is_signed))


def engine_states(state, group, called):
    """{name of the engine's: tensor, ``Numbers`` or scalar} for the ``state`` of one parameter as a library keeps it.
    ``group``: its param group. ``called``: of the parameter, for errors. FormatError for a state that cannot be taken
    over: in 4 bits, of another map, or without its scales."""
    flat = {**state, **state.get(NESTED, {})} if isinstance(state.get(NESTED), dict) else dict(state)
    flat.pop(NESTED, None)
    unknown = next((key for key in flat if str(key).endswith(("::quantized", "::scales"))), None)
    if unknown is not None:
        raise _C.FormatError(f"the state '{unknown}' of {called} is FlashOptim's, whose 8 bits have another form; save "
                             "its states in bf16 or fp32")
    is_moonlight = "use_muon" in flat  # or made like it: its momentum is the sum, not the average
    if is_moonlight and "momentum_buffer" in flat:
        if "momentum" not in group:
            raise _C.FormatError(f"the momentum of {called} is a sum, which becomes an average by 1 - momentum; the "
                                 "param group has no 'momentum'")
        flat["momentum_buffer"] = Numbers(flat["momentum_buffer"], factor=1.0 - float(group["momentum"]))
    renamed = {"moment1": "exp_avg", "moment2": "exp_avg_sq"} if is_moonlight else {}
    if "algorithm" in group:  # dion's
        is_muon = group["algorithm"] == "muon"
        renamed = {"momentum": "momentum_buffer" if is_muon else "exp_avg", "variance": "exp_avg_sq"}
    taken = {}
    for key, value in flat.items():
        if key in ("state1", "state2"):
            taken[_OF_BITSANDBYTES[key[-1]]] = _of_bitsandbytes(flat, key, called)
        elif key not in _BESIDE:  # which are no states themselves
            taken[renamed.get(key, key)] = _of_torchao(value, key, called)
    if "algorithm" in group and "step" in group and taken:
        taken.setdefault("step", group["step"])
    return taken


def _of_bitsandbytes(state, key, called):
    values, number = state[key], key[-1]
    if key == "state1" and "state2" in state and values.numel() != state["state2"].numel():
        raise _C.FormatError(f"the state 'state1' of {called} has {values.numel()} elements and 'state2' "
                             f"{state['state2'].numel()}: it is of bitsandbytes' AdEMAMix, for which the engine has no "
                             "rule; take its AdamW or Lion")
    if values.dtype != torch.uint8:
        return values
    scales, found = state.get(f"absmax{number}"), state.get(f"qmap{number}")
    if scales is None or found is None or scales.numel() != math.ceil(values.numel() / BLOCK8):
        raise _C.FormatError(f"the state '{key}' of {called} has {values.numel()} codes of 8 bits; wanted with them "
                             f"'qmap{number}' and 'absmax{number}', a scale for each {BLOCK8}: save with block_wise="
                             "True and this version's blocks, or in 32 bits")
    _require_map(found, number == "1", key, called)
    return Numbers(values, scales, number == "1")


def _of_torchao(value, key, called):
    if not (hasattr(value, "codes") and hasattr(value, "scale")):
        return value
    found, codes = getattr(value, "qmap", None), value.codes
    if found is None or found.numel() != 256 or codes.numel() != value.numel() or codes.numel() % value.scale.numel():
        raise _C.FormatError(f"the state '{key}' of {called} is a {type(value).__name__}; wanted torchao's "
                             "OptimState8bit, or numbers: train on with AdamW8bit")
    _require_map(found, value.signed, key, called)
    return Numbers(codes, value.scale, value.signed, codes.numel() // value.scale.numel())


def as_numbers(value, called):
    """``value``, or the tensor of its numbers where it is a state of torchao's in 8 bits. Errors as of
    ``engine_states``."""
    found = _of_torchao(value, called, "the checkpoint")
    return found.read() if isinstance(found, Numbers) else found


def _require_map(found, is_signed, key, called):
    found = _read(found).float().flatten().cpu()
    if found.numel() != 256 or not torch.allclose(found, map8(is_signed), rtol=0, atol=1e-6):
        raise _C.FormatError(f"the codes of the state '{key}' of {called} are of another map than the dynamic one of "
                             "256 values; save in 32 bits")


def _read(values):
    return values.read() if hasattr(values, "read") else values.detach()


def _is_dense(values):
    return values.is_contiguous() or values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)


def _in_memory(values):
    """``values`` of one dimension, in the order of their memory where they are dense."""
    return values.as_strided((values.numel(),), (1,)) if _is_dense(values) else values.flatten()
