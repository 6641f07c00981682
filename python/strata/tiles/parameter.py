"""The parameter that stays in a module when it is cut into tiles: empty, with the name that users, optimizers and
checkpoints know. A computation with it outside the module gets a whole copy, if that is not too large."""

import torch
from torch.utils._pytree import tree_map

from .. import _C
from ..model.parameter import ParameterStatus, ShardedParameter, mark_managed, unmark_managed
from ..model.tiles import tiles_of
from .functions import whole
from .host_copy import HostCopy, values_on_host

# Operations that need no values.
_PLAIN = {
    "__get__", "__set__", "__delete__", "__hash__", "__repr__", "__format__", "_make_subclass", "data_ptr", "detach",
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_pinned", "is_shared",
    "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}  # properties that need values


class TiledParameter(ShardedParameter):
    """A parameter that is used in tiles. It is empty (``numel() == 0``), except within ``GatheredParameters``, where it
    is whole on the host. ``ds_shape`` and ``ds_numel`` are those of the whole.

    Reading ``module.weight`` gives this object. An operation on it gathers a whole copy, which autograd knows, and
    raises UsageError where the parameter is too large for that. An operation that would change it, or that registers a
    hook of its gradient, raises UsageError.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PLAIN and func not in _VIEWS:
                return func(*args, **kwargs)
            if name in _HOOKS:
                raise _C.UsageError(no_hooks(tiles_of(args[0]).name))
            if args and isinstance(args[0], TiledParameter) and _changes(name) and args[0].numel() == 0:
                raise _C.UsageError(
                    f"'{tiles_of(args[0]).name}' is used in tiles, and {name}() would change a copy of it; change it "
                    "within strata.zero.GatheredParameters(parameter, modifier_rank=<rank>), or by "
                    "strata.iter_pieces(parameter, modifier_rank=<rank>)"
                )
            args, kwargs = tree_map(_with_values, (args, kwargs))
            return func(*args, **kwargs)

    @property
    def ds_persist(self):
        return False

    @property
    def ds_status(self):
        return ParameterStatus.NOT_AVAILABLE if self.numel() == 0 else ParameterStatus.AVAILABLE

    @property
    def ds_tensor(self):
        parts = [t.core.local_part(t.index) for t in tiles_of(self) if t.core is not None]
        part = torch.cat(parts) if parts else self.detach().reshape(-1)
        part.ds_numel, part.status = part.numel(), ParameterStatus.AVAILABLE
        return part

    def all_gather(self, param_list=None, async_op=False, hierarchy=0):
        """Makes it whole on the host until ``partition()``. Collective."""
        if self.numel() == 0:
            self._strata_host_copy = HostCopy(self)

    def partition(self, param_list=None, hierarchy=0, has_been_updated=False):
        """Frees the whole values of ``all_gather()``."""
        copy = self.__dict__.pop("_strata_host_copy", None)
        if copy is not None:
            copy.end(0 if has_been_updated else None)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(values_on_host(self), self.requires_grad)
        return memo[id(self)]


def no_hooks(name):
    """str: the reason why a parameter of this name has no hooks of its gradient."""
    return (
        f"'{name}' is used in tiles, so that its gradient is never whole, and hooks of it (register_hook, "
        "register_post_accumulate_grad_hook) would not be called; hook the module, whose forward and backward hooks "
        "are called as usual, or leave the parameter whole by strata.tiles.match"
    )


def _changes(name):
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")


def _with_values(item):
    if not isinstance(item, TiledParameter) or item.numel():
        return item
    return whole(tiles_of(item))


def mark_tiled(parameter, tiles):
    """Makes ``parameter`` empty, and a TiledParameter in place."""
    parameter._strata_tiles = tiles
    if parameter.numel():
        parameter.data = parameter.data.new_empty(0)
    mark_managed(parameter, tiles.shape)
    if type(parameter) is ShardedParameter:
        parameter.__class__ = TiledParameter


def unmark_tiled(parameter):
    """Undoes ``mark_tiled``; the parameter gets the values of its tiles."""
    tiles = parameter.__dict__.pop("_strata_tiles")
    if type(parameter) is TiledParameter:
        parameter.__class__ = ShardedParameter
    unmark_managed(parameter)
    values = tiles.joined()
    if values is not None:
        parameter.data = values
    return values is not None
