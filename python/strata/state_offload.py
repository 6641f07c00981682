"""States that leave the device for a while: ``engine.offload_states()`` and ``engine.reload_states()``."""

import logging

from . import _C

logger = logging.getLogger("strata")

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class StateOffload:
    """The part of ``Engine`` that frees device memory for other uses between two phases of training."""

    _told_of_weights = False

    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """Moves states of training from the device to host memory. Their memory on the device is free when this
        returns. ``reload_states()`` brings them back, bit for bit. Collective; between passes, also in a step that
        already has gradients. States that are offloaded already, to the host or to a drive, do not move.

        Until the reload ``step()``, checkpoints, and reading or setting states of parameters raise UsageError. So do
        ``backward()`` while gradient memory is away, and a forward or a read of a parameter while weights are away.
        Parameters have the shape [0] while the weights are away; the script must not use views of their memory
        (``p.data``) then. While the weights are on the device, the model may be evaluated, gathered and saved
        (``save_pretrained``).

        The weights stay, with one warning, where the ranks' transport cannot free their memory (gloo, drivers
        without virtual memory management). Weights in fp32 are their own masters: nothing moves as "hp_params" then.
        Where an optimizer of the script's updates the shards, "optim_states" moves the tensors of its ``state`` that
        are on the device; the parameters in its groups are empty while masters or weights are away, and have other
        memory afterwards.

        Args:
            include: which states, by DeepSpeed's names or ``OffloadStateTypeEnum``: "optim_states" (``exp_avg``,
                ``exp_avg_sq``), "hp_params" (masters, or their remainders), "lp_params" (the weights), "lp_grads"
                (reduced gradients) and "contiguous_grad_buffer" (gradients that are not reduced yet).
                None: all. The same on every rank.
            device: "cpu", or DeepSpeed's ``OffloadDeviceEnum.cpu``; "none" does nothing but warn.
            pin_memory: into pinned host memory, as far as the system lets this process pin some.
            non_blocking: has no effect: memory is free only when the copies are complete.

        Raises:
            UsageError: for other states and devices; within a backward pass or ``GatheredParameters``.
            OutOfMemoryError: on every rank, where a host has no room. The engine then counts all states but the
                weights as away: ``reload_states()`` brings back those that have moved.
        """
        where = _text(device)
        if where == "none":
            logger.warning("offload_states: device is 'none', so nothing is moved; write \"cpu\"")
            return
        if where != "cpu":
            raise _C.UsageError("offload_states moves states to the host: write device=\"cpu\"; to rest on a drive is "
                                f"for zero_optimization.offload_optimizer; found {where!r}")
        states = STATES if include is None else [_text(name) for name in include]
        for name in states:
            if name not in STATES:
                raise _C.UsageError(f"offload_states: include names states of {', '.join(STATES)}; found {name!r}")
        weights_follow = self.core.offload_states(list(states), pin_memory)
        if not weights_follow and not self._told_of_weights and self.global_rank == 0:
            self._told_of_weights = True
            logger.warning("offload_states: the weights (lp_params) stay on the device, since %s cannot give their "
                           "memory back; the other states are moved", self.collectives_name)

    def reload_states(self, non_blocking=False):
        """Brings back all states that ``offload_states()`` moved. Collective. Does nothing where none is away.

        Args:
            non_blocking: has no effect: all states are back when this returns.

        Raises:
            OutOfMemoryError: on every rank, where a device has no room. States that are not back stay on the host;
                free memory, and call it again.
        """
        self.core.reload_states()
        outside = getattr(self.core, "segment_states", None)  # where an optimizer of the user's updates the shards
        if outside is not None:
            outside.take_back(self.core)


def _text(name):
    """The text of a word, or of a member of an enumeration of words."""
    return str(getattr(name, "value", name))
