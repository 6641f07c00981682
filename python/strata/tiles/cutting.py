"""Cuts the too large parameters of a model into tiles, before an engine plans its units, and undoes this."""

import logging
import math

from .. import _C
from ..model.owner import clear_owner, owner_of, set_owner
from ..model.tiles import Tiles
from . import builtin
from .causal import install as install_causal_loss
from .parameter import mark_tiled, no_hooks, unmark_tiled
from .rules import find_rule

logger = logging.getLogger("strata")


def _serves(rule, module, name):
    return rule is not None and name in rule.parameters and "forward" not in module.__dict__


def _has_hooks(parameter):
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Cut:
    """The parameters of one model that are in tiles. After an error within the constructor the model is unchanged.

    Args:
        tree: the ``ModelTree``; it gets the tiles in place of the parameters that are cut.
        config: a _C.Config.
        budget: a ``Budget``.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded, or None; it gets
            their tiles as well.

    Raises:
        ConfigError: a module with a too large parameter has no rule; one row exceeds the budget; a rule's tiles do not
            hold every row exactly once.
        UsageError: a module cannot be used in tiles; a parameter has hooks.
    """

    def __init__(self, tree, config, budget, born_flat=None):
        self._tree, self._config, self._budget = tree, config, budget
        self._born_flat = {} if born_flat is None else born_flat
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
                installing.setdefault(id(module), (module, find_rule(module), {}))[2][own] = tiles
            parameters.extend((f"{name}[{t.begin}:{t.end}]", t.parameter) for t in tiles)
        for module, rule, tiles in installing.values():
            self._undo.append(rule.install(module, tiles))
        heads = {key: tiles["weight"] for key, (_, rule, tiles) in installing.items()
                 if type(rule) is builtin.LinearRule}  # fmt: skip
        self._undo.extend(filter(None, (install_causal_loss(m, heads) for _, m, _ in self._tree.modules if heads)))
        self._tree.parameters = parameters

    def _can_be_cut(self, name, homes, hooked):
        """Whether a parameter can be cut, where the configuration does not ask for tiles; warns if not."""
        if hooked:
            logger.warning("'%s' takes more than half of what the device has free, and hooks wait for its gradient: it "
                           "is gathered whole. Without them it can be used in tiles", name)  # fmt: skip
            return False
        unknown = [module for _, module, own in homes if not _serves(find_rule(module), module, own)]
        if unknown:
            logger.warning(
                "'%s' takes more than half of what the device has free, and there is no tiling rule for %s: it is "
                "gathered whole. strata.register_tiling gives it one", name, type(unknown[0]).__name__,
            )
        return not unknown

    def _is_large(self, name, parameter):
        shape = self._shape(parameter)
        if not shape:
            return False
        nbytes = math.prod(shape) * self._itemsize(parameter)
        return _C.wants_tiles(name, nbytes, self._budget.largest, self._config.tile_matches)

    def _cut(self, name, parameter, homes):
        if _has_hooks(parameter):
            raise _C.UsageError(no_hooks(name))
        shape = self._shape(parameter)
        row_bytes = math.prod(shape[1:]) * self._itemsize(parameter)
        ranges = None
        for path, module, own in homes:
            rule = find_rule(module)
            if not _serves(rule, module, own):
                raise _C.ConfigError(self._no_rule(name, shape, row_bytes, path, module, rule, own))
            rule.require(module)
            found = [tuple(r) for r in rule.cut(module, own, name, shape[0], row_bytes, self._budget.tile)]
            _C.require_tiles(name, shape[0], row_bytes, self._budget.tile, found)
            if ranges not in (None, found):
                raise _C.ConfigError(
                    f"'{name}' is shared by modules whose tiling rules cut it in different places: {len(ranges)} and "
                    f"{len(found)} tiles; the second is that of '{path}'. Have their rules cut it alike"
                )
            ranges = found
        tiles = Tiles(name, parameter, shape, ranges, [(module, own) for _, module, own in homes], self._budget.read)
        tiles.owner = owner_of(parameter)
        clear_owner(parameter)
        for tile in tiles:
            if id(parameter) in self._born_flat:
                self._born_flat[id(tile.parameter)] = (tile.rows, *shape[1:])
        mark_tiled(parameter, tiles)
        self.all.append(tiles)
        return tiles

    def _no_rule(self, name, shape, row_bytes, path, module, rule, own):
        nbytes = shape[0] * row_bytes
        why = f"no tiling rule for {type(module).__name__}"
        if rule is not None and own not in rule.parameters:
            why = f"the tiling rule of {type(module).__name__} does not know its '{own}'"
        elif rule is not None:
            why = f"that module has a forward of its own in place of {type(module).__name__}'s"
        return (
            f"'{name}' takes {nbytes} bytes, more than the {self._budget.largest} of one parameter that may be "
            f"gathered at once (strata.tiles.max_gather), and there is {why} ('{path}'). Register one, "
            "strata.register_tiling("
            f"{type(module).__name__}, rule) with an instance of strata.tiles.TilingRule, or give "
            "strata.tiles.max_gather more, or leave it out by strata.tiles.match"
        )

    def _shape(self, parameter):
        core, index = owner_of(parameter)
        if core is not None:
            return list(core.full_shape(index))
        return list(self._born_flat.get(id(parameter), parameter.shape))

    def _itemsize(self, parameter):
        return self._config.weight_dtype(parameter.dtype).itemsize

    def commit(self):
        """Called when the engine has all values: frees the memory that held them before, and peers' views of it."""
        for tiles in self.all:
            tiles.owner = None, 0

    def undo(self):
        """Gives the modules whole parameters again, with the values of the tiles.

        Returns:
            [Parameter] without values, since their tiles are empty.
        """
        for take_back in reversed(self._undo):
            take_back()
        empty = []
        for tiles in self.all:
            parameter, (core, index) = tiles.whole, tiles.owner
            has_values = unmark_tiled(parameter)
            if core is not None and core.alive:  # it still has the values
                set_owner(parameter, core, index, weakly=False)
            elif not has_values:
                empty.append(parameter)
        self._undo, self.all = [], []
        self._tree.parameters = self._parameters
        return empty
