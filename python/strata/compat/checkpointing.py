"""``deepspeed.checkpointing``: recomputing activations, by ``torch.utils.checkpoint``."""

import torch
import torch.utils.checkpoint

_configured = False


def configure(mpu_=None, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None,
              num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None):  # fmt: skip
    """Records that the script checkpoints activations.

    Raises:
        NotImplementedError: for a setting that torch's checkpointing does not have.
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


def checkpoint(function, *args, **kwargs):
    """``function(*args, **kwargs)``, whose activations are computed again in backward. The function gets every keyword;
    tensors among these take part in autograd. Several results are returned as a tuple."""
    count, names = len(args), tuple(kwargs)

    def call(*given):  # torch looks for devices of random numbers, and for its own options, among the arguments
        return function(*given[:count], **dict(zip(names, given[count:])))

    found = torch.utils.checkpoint.checkpoint(call, *args, *kwargs.values(), use_reentrant=False)
    if not isinstance(found, (tuple, list)):
        return found
    return found[0] if len(found) == 1 else tuple(found)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """Stands for DeepSpeed's autograd function, for scripts that call ``apply`` themselves."""

    @staticmethod
    def apply(function, outputs, *args):
        """Appends the results of ``checkpoint(function, *args)`` to the list ``outputs``."""
        result = checkpoint(function, *args)
        outputs.extend([result] if isinstance(result, torch.Tensor) else result)
