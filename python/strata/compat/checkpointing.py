"""``deepspeed.checkpointing``, which recomputes activations by ``torch.utils.checkpoint``; the files of DeepSpeed's
checkpoints, and the classes of objects in them."""

import glob
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter

import torch
import torch.utils.checkpoint

from ..sequence.spared_memory import SparedMemory

_configured = _in_cpu = False


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None,
              num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None):  # fmt: skip
    """Records that the script checkpoints activations, and whether ``checkpoint`` keeps inputs on the host
    (``checkpoint_in_cpu``), as ``strata.activations.device`` "cpu" does. NotImplementedError for a setting that torch's
    checkpointing does not have."""
    global _configured, _in_cpu
    asked = {"partition_activations": partition_activations, "contiguous_checkpointing": contiguous_checkpointing}
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise NotImplementedError(f"Strata does not offer {wanted[0]}: activations are recomputed by "
                                  "torch.utils.checkpoint; leave the setting out")
    _configured, _in_cpu = True, bool(checkpoint_in_cpu)


def is_configured():
    """bool: whether ``configure()`` was called."""
    return _configured


def reset():
    """Does nothing: no activations are kept between passes."""


def checkpoint(function, *args, **kwargs):
    """``function(*args, **kwargs)``, whose activations are computed again in backward. The function gets every keyword;
    tensors among these take part in autograd. Several results are returned as a tuple."""
    count, names = len(args), tuple(kwargs)

    def call(*given):  # torch looks for devices of random numbers, and for its own options, among the arguments
        return function(*given[:count], **dict(zip(names, given[count:])))

    given, spared = (*args, *kwargs.values()), SparedMemory.latest()
    with nullcontext() if spared is None else spared.inputs.around(function, given, _in_cpu):
        found = torch.utils.checkpoint.checkpoint(call, *given, use_reentrant=False)
    if not isinstance(found, (tuple, list)):
        return found
    return found[0] if len(found) == 1 else tuple(found)


class CheckpointFunction:
    """Stands for DeepSpeed's autograd function, for scripts that call ``apply`` themselves."""

    @staticmethod
    def apply(function, outputs, *args):
        """Appends the results of ``checkpoint(function, *args)`` to the list ``outputs``."""
        result = checkpoint(function, *args)
        outputs.extend([result] if isinstance(result, torch.Tensor) else result)


# --- files of a checkpoint, through the functions that frameworks call ---


def get_model_state_file(checkpoint_dir, zero_stage):
    """str: the file of the model's states of rank 0 in the folder of one tag, which was saved at ``zero_stage``.
    FileNotFoundError where there is none."""
    return _existing(checkpoint_dir, f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt")[0]


def get_optim_files(checkpoint_dir):
    """[str]: the files of the optimizer's states, of every rank in order. FileNotFoundError where there are none."""
    return _existing(checkpoint_dir, "*_optim_states.pt")


def _existing(folder, pattern):
    found = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)),
                   key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])
    if not found:
        raise FileNotFoundError(
            f"'{folder}' has no file {pattern} of DeepSpeed. zero_to_fp32.py beside a checkpoint of Strata makes one "
            "file of fp32 weights of it, and `strata consolidate` a Hugging Face folder")
    return found


# --- classes that checkpoints need to be unpickled: data without behaviour ---


class LossScalerBase:
    """The state of a loss scaler, as attributes: ``cur_scale`` and ``loss_scale``, float, the factor of the loss."""

    def __init__(self, cur_scale=1.0):
        self.cur_scale = cur_scale

    loss_scale = property(attrgetter("cur_scale"))


class LossScaler(LossScalerBase):
    """A constant loss scale."""


class DynamicLossScaler(LossScalerBase):
    """A loss scale that adapts; the engine's own follows ``fp16`` of the configuration."""


@dataclass
class fragment_address:  # noqa: N801 - the name that is in files
    """A range of a flat partition: its number of elements and its offset."""

    numel: int
    start: int
