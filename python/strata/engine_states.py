"""``optimizer.state`` where the engine keeps the states: an empty dict that passes on or refuses a script's changes."""

import collections
import weakref

from . import _C


class EngineStates(collections.defaultdict):
    """As torch's ``state`` before the first step. While an engine trains, ``clear()`` drops the engine's states, as it
    would in torch, and reading a parameter's state is an error.

    Args:
        optimizer: the ``ShardedOptimizer``; this keeps a weak reference.
    """

    def __init__(self, optimizer):
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)

    def _trained(self):
        """The optimizer, while its engine lives, else None."""
        optimizer = self._optimizer()
        return optimizer if optimizer is not None and optimizer.trains() else None

    def __missing__(self, parameter):
        if self._trained() is None:
            return super().__missing__(parameter)
        raise _C.UsageError(
            "optimizer.state[p] was asked for, and the engine keeps this optimizer's states, in shards; call "
            "strata.utils.safe_get_full_optimizer_state(p, 'exp_avg') and safe_set_full_optimizer_state() for a whole "
            "one on every rank, or optimizer.state_dict() for this rank's part of all; optimizer.state.clear() begins "
            "anew"
        )

    def clear(self):
        """Drops the engine's states on this rank; every rank must call it."""
        super().clear()
        optimizer = self._trained()
        if optimizer is not None:
            from .local_states import drop_states  # not before the first use

            drop_states(optimizer, optimizer._bound())

    def replace(self, states):
        """``optimizer.state = states``.

        Raises:
            UsageError: they are not empty.
        """
        if states and self._trained() is not None:
            raise _C.UsageError("optimizer.state was set, and the engine keeps this optimizer's states; give them to "
                                "optimizer.load_state_dict(), or an empty dict to begin anew")
        self.clear()
        self.update(states)
