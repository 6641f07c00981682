"""Rules for modules that use a parameter in tiles, and the table that finds them: ``register_tiling``.

Strata's own rules, for ``torch.nn.Linear`` and others, are registered in the same way.
"""

from .. import _C


class TilingRule:
    """The way in which modules of a class use their parameters in tiles. Inherit from it, and call
    ``strata.register_tiling(Class, Rule())``.

    One rule serves many modules and keeps no reference to them. It has a ``forward(module, tiles, *args, **kwargs)``,
    which computes the module's forward with its parameters in tiles.

        module: the module; its other parameters are whole.
        tiles: {name: strata.model.tiles.Tiles} of those of ``parameters`` that are cut. The operations of
            ``strata.tiles.functions`` take such a Tiles: linear, matmul, embedding, grouped_linear; ``apply_tile`` runs
            a function of your own with one tile.
        args, kwargs: of the module's forward.

    Attributes:
        parameters: names of the module's parameters that it can use in tiles.
    """

    parameters = ("weight",)

    def require(self, module):
        """Raises UsageError, with the reason, for a module that cannot be used in tiles at all."""

    def cut(self, module, name, full_name, rows, row_bytes, most):
        """[(first row, behind the last row)]: the tiles, which hold every row once, in order. The result must be the
        same on every rank.

        Args:
            module: the module.
            name: of its parameter, one of ``parameters``.
            full_name: in the model, for messages.
            rows: int, of the parameter's first dimension.
            row_bytes: int, of one row.
            most: int, bytes of a tile at most.
        """
        return _C.cut_rows(full_name, rows, row_bytes, most)

    def install(self, module, tiles):
        """Makes the module compute with ``tiles``: puts ``forward`` in place of its own.

        Returns:
            a function that undoes this.
        """
        before = module.__dict__.get("forward")
        module.__dict__["forward"] = _TiledForward(self, module, tiles)

        def take_back():
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before

        return take_back


class _TiledForward:
    """Replaces a module's forward; a copy or pickle of the module gets the class's own."""

    def __init__(self, rule, module, tiles):
        self._rule, self._module, self._tiles = rule, module, tiles
        self.__wrapped__ = type(module).forward.__get__(module)  # for inspect.signature

    def __call__(self, *args, **kwargs):
        return self._rule.forward(self._module, self._tiles, *args, **kwargs)

    def __deepcopy__(self, memo):
        import copy

        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self):
        return getattr, (self._module, "forward")


class _Registry:
    def __init__(self):
        self._by_class, self._by_test = {}, []

    def add(self, module_class, rule):
        if not isinstance(rule, TilingRule):
            raise _C.UsageError(
                "register_tiling(ModuleClass, rule) takes an instance of a class that inherits from "
                f"strata.tiles.TilingRule; found {rule!r}"
            )
        if type(rule).install is TilingRule.install and not callable(getattr(rule, "forward", None)):
            raise _C.UsageError(
                f"register_tiling(ModuleClass, rule): {type(rule).__name__} has no forward(module, tiles, *args, "
                "**kwargs), which computes what the module's forward does with its parameters in tiles; "
                "strata.tiles.TilingRule says how"
            )
        if isinstance(module_class, type):
            self._by_class[module_class] = rule
        elif callable(module_class):
            self._by_test.insert(0, (module_class, rule))
        else:
            raise _C.UsageError(
                "register_tiling(ModuleClass, rule) takes a class of modules, or a function that says whether a module "
                f"is one; found {module_class!r}"
            )

    def find(self, module):
        """The rule of the module's class, or of the nearest class from which it inherits its forward; else that of the
        newest function that accepts the module; else None."""
        for cls in type(module).__mro__:
            if cls in self._by_class:
                return self._by_class[cls]
            if "forward" in cls.__dict__:  # a rule of a base class does not know this forward
                break
        return next((rule for test, rule in self._by_test if test(module)), None)


_registry = _Registry()


def register_tiling(module_class, rule):
    """Lets modules of this class use their parameters in tiles. A rule for the same class replaces the earlier one.
    Call it before ``strata.initialize``, on every rank.

    Args:
        module_class: a class of ``torch.nn.Module``. It serves classes that inherit from it as well, unless they have a
            ``forward`` of their own. Or a function: module -> bool.
        rule: an instance of ``strata.tiles.TilingRule``.

    Raises:
        UsageError: for anything else.
    """
    _registry.add(module_class, rule)


def find_rule(module):
    """The ``TilingRule`` for this module, or None."""
    return _registry.find(module)
