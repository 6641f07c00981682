"""``optimizer.state`` where the engine keeps the states: empty, and what scripts do to it counts or is an error."""

import collections
import weakref

from . import _C


class EngineStates(collections.defaultdict):
    """As torch's ``state`` before the first step. While an engine trains, ``clear()`` drops what the engine has, as it
    would in torch, and asking for a parameter's state is an error.

    Args:
        optimizer: the ``ShardedOptimizer``, which is not kept.
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
        """Begins anew, on this rank: every rank has to."""
        super().clear()
        optimizer = self._trained()
        if optimizer is not None:
            from .local_states import drop_states  # not before somebody asks

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
