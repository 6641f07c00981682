"""The engine that owns a parameter, moves of ownership (from the user to an engine, between engines, and back), and the
``ds_*`` attributes of sharded parameters, for frameworks that know DeepSpeed's.

The user's Parameter objects stay the same objects; while an engine of stage 3 or ``zero.Init`` manages them, their
class is ``ShardedParameter``, also where they stay whole (small ones, and all on one rank). A deep copy or pickle of
one is a plain ``torch.nn.Parameter``; copying gathers it, which all ranks do then."""

import contextlib
import enum
import itertools
import math
import sys
import types
import weakref

import torch

from .. import _C
from .tiles import tiles_of


def set_owner(parameter, core, index, weakly=True):
    """Makes ``core``, a _C.ShardedModel, the owner, with the parameter's index there. ``weakly``: the parameter does
    not keep ``core``, which keeps the parameter where Python's collector cannot see it."""
    parameter._strata_core = weakref.ref(core) if weakly else core
    parameter._strata_index = index


def owner_of(parameter):
    """(core, index), or (None, None) for a parameter that no living engine owns."""
    core = getattr(parameter, "_strata_core", None)
    if isinstance(core, weakref.ref):
        core = core()
    if core is None or not core.alive:
        return None, None
    return core, parameter._strata_index


def parameter_at(module, name):
    """The Parameter of a module itself, or None: to read ``module.weight`` would gather its values, where the engine
    has them."""
    return dict.get(module._parameters, name)


def full_shape(parameter):
    """[int]: the shape of the whole parameter, gathered or not, in tiles, or to be loaded from files."""
    tiles, (core, index) = tiles_of(parameter), owner_of(parameter)
    if tiles is not None:
        return list(tiles.shape)
    return list(getattr(parameter, "ds_shape", parameter.shape) if core is None else core.full_shape(index))


def shaped(core, index, flat):
    """All elements of a parameter, ``flat`` in the order of its memory, in its shape: a view. A convolution's weight in
    torch's channels_last has its channels innermost."""
    shape = core.full_shape(index)
    if not core.channels_last(index):
        return flat.view(shape)
    images, channels, *places = shape
    return flat.view(images, *places, channels).movedim(-1, 1)


def flattened(core, index, value):
    """The inverse: a view where ``value`` has the parameter's memory format, else a copy."""
    return (value.movedim(1, -1) if core.channels_last(index) else value).reshape(-1)


@contextlib.contextmanager
def gathered(core, indices, modifier_rank=None):
    """Context in which parameters of ``core`` are whole; at its end every rank gets the values of ``modifier_rank``,
    unless that is None."""
    core.gather(indices)
    published = False
    try:
        yield
        if modifier_rank is not None:
            core.publish(indices, modifier_rank)
            published = True
    finally:
        core.release(indices, not published)


def clear_owner(parameter):
    parameter.__dict__.pop("_strata_core", None)
    parameter.__dict__.pop("_strata_index", None)


_ids = itertools.count()  # equal on all ranks, since all mark the same parameters in the same order


class ParameterStatus(enum.Enum):
    """Whether a parameter is whole on this rank now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedParameter(torch.nn.Parameter):
    """A parameter that is empty (``numel() == 0``, shape [0]) unless it is gathered or stays whole.

    Attributes:
        ds_id: int, unique to the parameter; equal on all ranks.
        ds_shape, ds_numel: torch.Size and int, the full shape, gathered or not.
        ds_status: ``ParameterStatus``, live.
        ds_tensor: a copy of this rank's part, of one dimension, with ``ds_numel`` and ``status``. A part may be empty.
        ds_persist: bool, whether it stays whole.
        ds_active_sub_modules: an empty set; scopes count their uses themselves.
    """

    ds_active_sub_modules = property(lambda self: set())

    @property
    def ds_persist(self):
        core, index = owner_of(self)
        return core is None or not core.is_sharded(index)

    @property
    def ds_status(self):
        gathered = self.ds_numel == 0 or self.numel() != 0
        return ParameterStatus.AVAILABLE if gathered else ParameterStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self):
        core, index = owner_of(self)
        part = self.detach().reshape(-1).clone() if core is None else core.local_part(index)
        part.ds_numel, part.status = part.numel(), ParameterStatus.AVAILABLE
        return part

    def partition_numel(self):
        """int: elements of this rank's part, which may be 0."""
        core, index = owner_of(self)
        if core is None:
            return self.ds_numel
        first, last = _C.state_range(core, index)
        return last - first

    def ds_summary(self, use_debug_name=False):
        """{text: value}: facts about this parameter, for logs. ``use_debug_name``: "id" is its name in the model."""
        core, index = owner_of(self)
        return {"id": core.parameter_name(index) if use_debug_name and core is not None else self.ds_id,
                "status": self.ds_status.name, "numel": self.numel(), "ds_numel": self.ds_numel,
                "shape": tuple(self.shape), "ds_shape": tuple(self.ds_shape), "requires_grad": self.requires_grad,
                "grad_shape": tuple(self.grad.shape) if self.grad is not None else None, "persist": self.ds_persist,
                "active_sub_modules": self.ds_active_sub_modules,
                "ds_tensor.shape": torch.Size([self.partition_numel()])}

    def all_gather(self, param_list=None, async_op=False, hierarchy=0):
        """Makes the parameters (``param_list``, of ShardedParameters; None: this one) whole until ``partition()``.
        Collective where gathers are. ``async_op`` and ``hierarchy`` have no effect: the parameters are whole when this
        returns."""
        for parameter in _listed(self, param_list):
            core, index = owner_of(parameter)
            if core is not None and not parameter.__dict__.get("_strata_gathered"):
                core.gather([index])
                parameter._strata_gathered = True

    def all_gather_coalesced(self, params=None, **kwargs):
        """The same as ``all_gather``: the engine gathers a block as one anyway. Returns an object whose ``wait()`` does
        nothing."""
        self.all_gather(params)
        return types.SimpleNamespace(wait=lambda **_: None)

    def partition(self, param_list=None, hierarchy=0, has_been_updated=False):
        """Releases the parameters, as ``all_gather`` takes them, unless a running scope uses them; values that were
        written to them are lost. With ``has_been_updated`` every rank gets the values that rank 0 has written;
        collective then."""
        for parameter in _listed(self, param_list):
            core, index = owner_of(parameter)
            if core is None or parameter.ds_status is not ParameterStatus.AVAILABLE:
                continue
            if not parameter.__dict__.pop("_strata_gathered", False):
                core.gather([index])
            try:
                if has_been_updated:
                    core.publish([index], 0)
            finally:
                core.put_back([index])
                core.release([index], True)

    def detach(self):
        """As torch's. ``torch.nn.Parameter(p)`` calls it, and needs an object of p's own class."""
        detached = super().detach()
        if sys._getframe(1).f_code is not torch.nn.Parameter.__new__.__code__:
            return detached
        return torch.Tensor._make_subclass(ShardedParameter, detached, False)

    @property
    def _is_param(self):
        return True

    @_is_param.setter
    def _is_param(self, value):  # torch.nn.Parameter(p) sets it on the object that it will return
        self.__class__ = torch.nn.Parameter

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            core, index = owner_of(self)
            with contextlib.nullcontext() if core is None else gathered(core, [index]):
                memo[id(self)] = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return torch.nn.Parameter(self.data.clone(), self.requires_grad).__reduce_ex__(protocol)


def _listed(parameter, param_list):
    return [parameter] if param_list is None else [p for p in param_list if isinstance(p, ShardedParameter)]


def mark_managed(parameter, shape):
    """Makes ``parameter`` (shape [0] or full) a ShardedParameter in place; ``shape`` is the full one. A parameter that
    is one already keeps its ``ds_id``."""
    if "ds_id" not in parameter.__dict__:
        parameter.ds_id = next(_ids)
    parameter.__dict__.pop("_strata_gathered", None)
    parameter.ds_shape = torch.Size(shape)
    parameter.ds_numel = parameter.ds_shape.numel()
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = ShardedParameter


def is_managed(parameter):
    """Whether it is a ShardedParameter."""
    return "ds_id" in parameter.__dict__


def unmark_managed(parameter):
    for name in ("ds_id", "ds_shape", "ds_numel", "_strata_gathered"):
        parameter.__dict__.pop(name, None)
    if type(parameter) is ShardedParameter:
        parameter.__class__ = torch.nn.Parameter


_DISCARDED = "_strata_discarded"


def take_ownership(core, parameters, stage, weakly=True):
    """Marks every parameter of ``core``, which was made from ``parameters``, a result of ``describe_parameters``. From
    now on they look as DeepSpeed's do at stage 3. ``weakly``: as ``set_owner`` takes it."""
    for index, (_, parameter, shape, *_rest) in enumerate(parameters):
        set_owner(parameter, core, index, weakly)
        parameter.__dict__.pop(_DISCARDED, None)
        if stage == 3:
            mark_managed(parameter, shape)
        else:
            unmark_managed(parameter)


def release_ownership(parameters):
    """Undoes ``take_ownership``, once the core is destroyed. Parameters of a later engine stay that engine's."""
    for _, parameter, shape, *_rest in parameters:
        if owner_of(parameter)[0] is not None:
            continue
        clear_owner(parameter)
        unmark_managed(parameter)
        if parameter.numel() == 0 and math.prod(shape) > 0:
            discard_values([parameter])


def discard_values(parameters):
    """Marks these parameters as empty because their engine has ended."""
    for parameter in parameters:
        setattr(parameter, _DISCARDED, True)


def require_values(named_parameters):
    """Raises UsageError where one of [(name, parameter)] is empty because its engine has ended, or is in tiles of a
    living engine."""
    for name, parameter in named_parameters:
        tiles = tiles_of(parameter)
        if tiles is not None and tiles[0].core is not None:
            raise _C.UsageError(
                f"'{name}' is used in tiles by an engine that lives, from which no other can take it over; end that "
                "one first, with engine.destroy(keep_values=True) to go on with its values")
    lost = [name for name, parameter in named_parameters if parameter.numel() == 0 and owner_of(parameter)[0] is None
            and (_DISCARDED in parameter.__dict__ or parameter.__dict__.get("ds_numel", 0) > 0)]
    if lost:
        raise _C.UsageError(f"{len(lost)} parameters of this model are empty: their engine was destroyed, or dropped, "
                            "and the shards went with it. End it with engine.destroy(keep_values=True), or build or "
                            f"load the model again. First: '{lost[0]}'")
