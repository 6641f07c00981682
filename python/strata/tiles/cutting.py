"""Cuts the too large parameters of a model into tiles, before an engine plans its units, and undoes this.

The parameter that stays in its module is empty, with the name that users, optimizers and checkpoints know. A
computation with it outside the module gets a whole copy, if that is not too large."""

import math
import re

import torch
from torch.utils._pytree import tree_map

from .. import _C
from ..model.parameter import (ParameterStatus, ShardedParameter, clear_owner, full_shape, mark_managed, owner_of,
                               set_owner, unmark_managed)
from ..model.tiles import Tiles, tiles_of
from ..views import logger
from .host_copy import end_host_copy, values_on_host

_TILE = 256 << 20  # bytes, the default


class Budget:
    """The bytes of one parameter that may be gathered at once. ``largest``: int, bytes; a larger parameter is cut.
    None: none is. ``tile``: int, bytes of a tile at most. ``read``: int, the most bytes of a cut parameter that may be
    whole for a read outside its modules; None: any. ``asked``: bool, whether the configuration sets the budget. If not,
    a parameter that cannot be cut is no error."""

    def __init__(self, config, half):
        self.read = half
        self.asked = config.tile_max is not None
        self.largest = config.tile_max if self.asked else half
        self.tile = config.tile_max if self.asked else min(_TILE, half or _TILE)
        if config.stage != 3:
            self.largest = None

    @classmethod
    def of_rank(cls, config, device, collectives, tree):
        """Collective on GPUs: half of the smallest free memory of a rank; the model's own memory counts as free, since
        the engine takes it over. A larger parameter would not fit beside its gradient."""
        if device.type != "cuda":
            return cls(config, None)
        free = torch.cuda.mem_get_info(device)[0]
        free += sum(p.numel() * p.element_size() for _, p in tree.parameters if p.device == device)
        # Ranks of other stages take part; a later check reports that stages differ.
        return cls(config, min(int(text) for text in collectives.all_gather_text(str(free // 2))))

    @classmethod
    def of_job(cls, config, device, device_memory):
        """The budget of a job that does not run."""
        return cls(config, device_memory // 2 if device == "cuda" and device_memory is not None else None)


def cut_parameters(tree, config, budget, from_files=None):
    """Cuts the parameters of a model that exceed the budget: ``tree.cut``, a ``Cut`` or None, holds them."""
    # An upper bound; the configuration's precision may need fewer bytes.
    sizes = (math.prod(_full_shape(p, from_files)) * max(p.dtype.itemsize, 4) for _, p in tree.parameters)
    if budget.largest is None or max(sizes, default=0) <= budget.largest:
        return
    cut = Cut(tree, config, budget, from_files)
    tree.cut = cut if cut.all else None


def _full_shape(parameter, from_files):
    shape = (from_files or {}).get(id(parameter))
    return full_shape(parameter) if shape is None else list(shape)


# Operations that need no values.
_PLAIN = {"__get__", "__set__", "__delete__", "__hash__", "__repr__", "__format__", "_make_subclass", "data_ptr",
          "detach", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
          "is_pinned", "is_shared", "ndimension", "nelement", "numel", "requires_grad_", "size", "storage_offset",
          "stride", "untyped_storage"}
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}  # properties that need values


class TiledParameter(ShardedParameter):
    """A parameter that is used in tiles. It is empty (``numel() == 0``), except within ``GatheredParameters``, where it
    is whole on the host. ``ds_shape`` and ``ds_numel`` are those of the whole. Reading ``module.weight`` gives this
    object. An operation on it gathers a whole copy, which autograd knows. UsageError where it is too large for that,
    for an operation that would change it, and for one that registers a hook of its gradient."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PLAIN and func not in _VIEWS:
                return func(*args, **kwargs)
            if name in _HOOKS:
                raise _C.UsageError(no_hooks(tiles_of(args[0]).name))
            changes = re.search("[^_]_$", name) or name in ("__setitem__", "__iadd__", "__imul__")
            if args and isinstance(args[0], TiledParameter) and changes and args[0].numel() == 0:
                raise _C.UsageError(f"'{tiles_of(args[0]).name}' is used in tiles, and {name}() would change a copy of "
                                    "it; change it within strata.zero.GatheredParameters(parameter, "
                                    "modifier_rank=<rank>), or by strata.iter_pieces(parameter, modifier_rank=<rank>)")
            args, kwargs = tree_map(_with_values, (args, kwargs))
            return func(*args, **kwargs)

    ds_persist = False

    @property
    def ds_tensor(self):
        parts = [t.core.local_part(t.index) for t in tiles_of(self) if t.core is not None]
        part = torch.cat(parts) if parts else self.detach().reshape(-1)
        part.ds_numel, part.status = part.numel(), ParameterStatus.AVAILABLE
        return part

    def all_gather(self, param_list=None, async_op=False, hierarchy=0):
        """Makes it whole on the host until ``partition()``. Collective."""
        if self.numel() == 0:
            self.data = values_on_host(self)
            self._strata_gathered = True

    def partition(self, param_list=None, hierarchy=0, has_been_updated=False):
        """Frees the whole values of ``all_gather()``."""
        if self.__dict__.pop("_strata_gathered", False):
            end_host_copy(self, 0 if has_been_updated else None)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(values_on_host(self), self.requires_grad)
        return memo[id(self)]


def no_hooks(name):
    """str: the reason why a parameter of this name has no hooks of its gradient."""
    return (f"'{name}' is used in tiles, so that its gradient is never whole, and hooks of it (register_hook, "
            "register_post_accumulate_grad_hook) would not be called; hook the module, whose forward and backward "
            "hooks are called as usual, or leave the parameter whole by strata.tiles.match")


def _with_values(item):
    if not isinstance(item, TiledParameter) or item.numel():
        return item
    from .functions import whole  # not before a cut parameter is used

    return whole(tiles_of(item))


def _serves(rule, module, name):
    return rule is not None and name in rule.parameters and "forward" not in module.__dict__


def _has_hooks(parameter):
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Cut:
    """The parameters of one model that are in tiles. After an error within the constructor the model is unchanged.
    ConfigError where a module with a too large parameter has no rule, one row exceeds the budget, or a rule's tiles do
    not hold every row exactly once. UsageError where a module cannot be used in tiles, or a parameter has hooks.
    ``tree``: the ``ModelTree``; it gets the tiles in place of the parameters that are cut. ``config``, ``budget``: a
    _C.Config and a ``Budget``. ``from_files``: {id(parameter): full shape} of parameters that are empty until they are
    loaded, or None; it gets their tiles as well."""

    def __init__(self, tree, config, budget, from_files=None):
        from .rules import find_rule  # most models need no rule

        self._tree, self._config, self._budget, self._find_rule = tree, config, budget, find_rule
        self._from_files = {} if from_files is None else from_files
        self.all = []  # of Tiles
        self._undo = []
        self._parameters = tree.parameters
        try:
            self._cut_all()
        except BaseException:
            self.undo()
            raise

    def _cut_all(self):
        large = {id(p): name for name, p in self._tree.parameters if self._is_large(name, p)}
        if not large:
            return
        homes = {}
        for path, module, _ in self._tree.modules:
            for name, parameter in dict.items(module._parameters):
                if id(parameter) in large:
                    homes.setdefault(id(parameter), []).append((path, module, name))
        if not self._budget.asked:
            hooked = {id(p) for _, p in self._tree.parameters if _has_hooks(p)}
            large = {key: name for key, name in large.items() if self._can_be_cut(name, homes[key], key in hooked)}
        installing = {}  # id(module) -> (module, rule, {name: Tiles})
        parameters = []
        for name, parameter in self._tree.parameters:
            if id(parameter) not in large:
                parameters.append((name, parameter))
                continue
            tiles = self._cut(name, parameter, homes[id(parameter)])
            for _, module, own in homes[id(parameter)]:
                installing.setdefault(id(module), (module, self._find_rule(module), {}))[2][own] = tiles
            parameters.extend((f"{name}[{t.begin}:{t.end}]", t.parameter) for t in tiles)
        for module, rule, tiles in installing.values():
            self._undo.append(rule.install(module, tiles))
        from . import rules, vocabulary_loss  # not before a parameter is cut

        heads = {id(m): tiles["weight"] for m, rule, tiles in installing.values() if type(rule) is rules.LinearRule}
        undo = (vocabulary_loss.install(module, heads) for _, module, _ in self._tree.modules if heads)
        self._undo += filter(None, undo)
        self._tree.parameters = parameters

    def _can_be_cut(self, name, homes, hooked):
        """Whether a parameter can be cut, where the configuration does not ask for tiles; warns if not."""
        if hooked:
            logger.warning("'%s' takes more than half of what the device has free, and hooks wait for its gradient: it "
                           "is gathered whole. Without them it can be used in tiles", name)  # fmt: skip
            return False
        unknown = [module for _, module, own in homes if not _serves(self._find_rule(module), module, own)]
        if unknown:
            logger.warning(
                "'%s' takes more than half of what the device has free, and there is no tiling rule for %s: it is "
                "gathered whole. strata.register_tiling gives it one", name, type(unknown[0]).__name__)
        return not unknown

    def _is_large(self, name, parameter):
        shape = _full_shape(parameter, self._from_files)
        nbytes = math.prod(shape) * self._itemsize(parameter)
        return shape and _C.wants_tiles(name, nbytes, self._budget.largest, self._config.tile_matches)

    def _cut(self, name, parameter, homes):
        if _has_hooks(parameter):
            raise _C.UsageError(no_hooks(name))
        shape = _full_shape(parameter, self._from_files)
        row_bytes = math.prod(shape[1:]) * self._itemsize(parameter)
        ranges = None
        for path, module, own in homes:
            rule = self._find_rule(module)
            if not _serves(rule, module, own):
                raise _C.ConfigError(self._no_rule(name, shape, row_bytes, path, module, rule, own))
            rule.require(module)
            found = [tuple(r) for r in rule.cut(module, own, name, shape[0], row_bytes, self._budget.tile)]
            _C.require_tiles(name, shape[0], row_bytes, self._budget.tile, found)
            if ranges not in (None, found):
                raise _C.ConfigError(
                    f"'{name}' is shared by modules whose tiling rules cut it in different places: {len(ranges)} and "
                    f"{len(found)} tiles; the second is that of '{path}'. Have their rules cut it alike")
            ranges = found
        tiles = Tiles(name, parameter, shape, ranges, [(module, own) for _, module, own in homes], self._budget.read)
        tiles.owner = owner_of(parameter)
        clear_owner(parameter)
        if id(parameter) in self._from_files:
            self._from_files.update((id(tile.parameter), (tile.rows, *shape[1:])) for tile in tiles)
        parameter._strata_tiles = tiles
        if parameter.numel():
            parameter.data = parameter.data.new_empty(0)
        mark_managed(parameter, tiles.shape)
        if type(parameter) is ShardedParameter:
            parameter.__class__ = TiledParameter
        self.all.append(tiles)
        return tiles

    def _no_rule(self, name, shape, row_bytes, path, module, rule, own):
        nbytes = shape[0] * row_bytes
        kind = type(module).__name__
        why = f"no tiling rule for {kind}"
        if rule is not None and own not in rule.parameters:
            why = f"the tiling rule of {kind} does not know its '{own}'"
        elif rule is not None:
            why = f"that module has a forward of its own in place of {kind}'s"
        return (f"'{name}' takes {nbytes} bytes, more than the {self._budget.largest} of one parameter that may be "
                f"gathered at once (strata.tiles.max_gather), and there is {why} ('{path}'). Register one, "
                f"strata.register_tiling({kind}, rule) with an instance of strata.tiles.TilingRule, or give "
                "strata.tiles.max_gather more, or leave it out by strata.tiles.match")

    def _itemsize(self, parameter):
        return self._config.weight_dtype(parameter.dtype).itemsize

    def commit(self):
        """Called when the engine has all values: frees the memory that held them before, and peers' views of it."""
        for tiles in self.all:
            tiles.owner = None, 0

    def undo(self):
        """Gives the modules whole parameters again, with the values of the tiles. Returns [Parameter] without values,
        since their tiles are empty."""
        for take_back in reversed(self._undo):
            take_back()
        empty = []
        for tiles in self.all:
            parameter, (core, index), values = tiles.whole, tiles.owner, tiles.joined()
            del parameter._strata_tiles
            if type(parameter) is TiledParameter:
                parameter.__class__ = ShardedParameter
            unmark_managed(parameter)
            if values is not None:
                parameter.data = values
            if core is not None and core.alive:  # it still has the values
                set_owner(parameter, core, index, weakly=False)
            elif values is None:
                empty.append(parameter)
        self._undo, self.all = [], []
        self._tree.parameters = self._parameters
        return empty
