"""``deepspeed.checkpointing``: recomputing activations, by ``torch.utils.checkpoint``."""

import torch
import torch.utils.checkpoint

_configured = False


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None,
              num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None):  # fmt: skip
    """Says that the script checkpoints activations.

    Raises:
        NotImplementedError: for what torch's checkpointing does not do.
    """
    global _configured
    asked = {"partition_activations": partition_activations, "contiguous_checkpointing": contiguous_checkpointing,
             "checkpoint_in_cpu": checkpoint_in_cpu}  # fmt: skip
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise NotImplementedError(f"Strata does not offer {wanted[0]}: activations are recomputed by "
                                  "torch.utils.checkpoint; leave the setting out")
    _configured = True


def is_configured():
    """bool: whether ``configure()`` was called."""
    return _configured


def reset():
    """Does nothing: no activations are kept between passes."""


def checkpoint(function, *args):
    """``function(*args)``, whose activations are computed again in backward."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """Where scripts call ``apply`` themselves."""

    @staticmethod
    def apply(function, outputs, *args):
        """Fills the list ``outputs`` with what ``checkpoint(function, *args)`` returns."""
        result = checkpoint(function, *args)
        outputs.extend([result] if isinstance(result, torch.Tensor) else result)
