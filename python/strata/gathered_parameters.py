"""``zero.GatheredParameters``, as DeepSpeed has it."""

import torch

from . import _C
from .model.owner import owner_of
from .model.parameter import is_managed
from .ranks.runtime import rank_and_world_size
from .tiles.host_copy import HostCopies

__all__ = ["GatheredParameters"]

_ITS_OWN = 0  # stands for memory of the engine


class GatheredParameters:
    """Context in which parameters are whole on every rank. At its end they are released, unless a running forward or
    an outer context holds them.

    Collective when ``modifier_rank`` is given, or when ranks gather through a process group; every rank
    must then enter with the same parameters. Contexts nest; duplicates, None and parameters that no engine
    owns are ignored. A parameter that is used in tiles is whole on the host, not on the model's device;
    ``strata.iter_pieces`` gives it piece by piece.

    Args:
        params: a Parameter, or an iterable of Parameters.
        modifier_rank: the rank whose changes count: at the end every rank gets this rank's values, in the weights
            and in the fp32 master weights. None: read only.
        fwd_module: accepted for DeepSpeed's sake; the engine gathers parameters of other modules when they are read.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: ``modifier_rank`` is not a rank of the job; the host has no room for a parameter that is used in
            tiles. At the end with ``modifier_rank=None``: on each rank that has changed a parameter in place, or given
            it other memory (``p.data = tensor``); the change is lost where the parameter is sharded. The context does
            not see changes that autograd does not count (``p.data.mul_(2)``). At the end with a ``modifier_rank``:
            where a parameter was given a tensor of another shape or dtype.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._modifier_rank = modifier_rank
        self._by_core = {}
        self._managed = {}  # id -> parameter
        self._copies = HostCopies()  # of parameters that are used in tiles
        if not enabled:
            return
        _require_rank(modifier_rank)
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            if self._copies.add(parameter):
                continue
            core, index = owner_of(parameter)
            if core is not None:
                self._by_core.setdefault(id(core), (core, set()))[1].add(index)
            if core is not None or (parameter is not None and is_managed(parameter)):
                self._managed[id(parameter)] = parameter

    def __enter__(self):
        self._held = []
        try:
            self._copies.make()
            for core, indices in self._by_core.values():
                indices = sorted(indices)
                core.gather(indices)
                self._held.append((core, indices))
                if self._modifier_rank is not None:
                    core.wait_for_all()  # other ranks may still read the last step's values from this memory
        except BaseException:
            self._release()
            raise
        self._versions, self._memory = (
            {key: state(parameter) for key, parameter in self._managed.items()} for state in (_version, _memory))
        return self

    def __exit__(self, kind, value, traceback):
        try:
            if kind is not None:
                self._put_back()
            elif self._modifier_rank is not None:
                self._copies.end(self._modifier_rank)
                for core, indices in self._held:
                    core.publish(indices, self._modifier_rank)
                for parameter in self._managed.values():
                    parameter._strata_published = _version(parameter)
            else:
                self._require_unchanged()
        except BaseException:
            self._put_back()
            raise
        finally:
            self._release()  # the gathered copies must not keep half a change
        return False

    def _put_back(self):
        for key, parameter in self._managed.items():
            core, index = owner_of(parameter)
            if core is not None and self._memory[key] == _ITS_OWN:  # else an outer context has replaced the memory
                core.put_back([index])

    def _release(self):
        self._copies.end(None)
        held, self._held = self._held, []
        for core, indices in held:
            core.release(indices, True)

    def _require_unchanged(self):
        changed = [
            parameter
            for key, parameter in self._managed.items()
            if _version(parameter) > max(self._versions[key], parameter.__dict__.get("_strata_published", 0))
            or _memory(parameter) not in (self._memory[key], _ITS_OWN)
        ]
        if changed:
            core, index = owner_of(changed[0])
            first = f"'{core.parameter_name(index)}'" if core is not None else f"of shape {tuple(changed[0].shape)}"
            self._changed(
                f"{len(changed)} parameters were changed within GatheredParameters(modifier_rank=None), which is for "
                "reading; pass modifier_rank=<the rank whose changes shall be everybody's>, or change a copy. First: "
                f"{first}"
            )
            self._put_back()

    def _changed(self, message):
        """Called where parameters were changed though they are for reading."""
        raise _C.UsageError(message)


def _require_rank(modifier_rank):
    world = rank_and_world_size()[1]
    if modifier_rank is not None and not 0 <= modifier_rank < world:
        raise _C.UsageError(f"modifier_rank must be a rank of this job, 0 to {world - 1}; got {modifier_rank}")


def _version(parameter):
    return 0 if parameter.is_inference() else parameter._version


def _memory(parameter):
    """A key of a parameter's memory; it changes where a script gives the parameter other memory (``p.data = x``)."""
    core, index = owner_of(parameter)
    if core is not None and not core.replaced(index):
        return _ITS_OWN
    return parameter.untyped_storage()._cdata
