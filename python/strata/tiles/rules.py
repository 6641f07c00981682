"""Rules for modules that use a parameter in tiles, and the table that finds them: ``register_tiling``.

Strata registers its own rules in the same way: for linear layers, embeddings, transformers' Conv1D and its fused
experts. A module of fused experts (transformers 5) takes its forward from a registry of implementations, by the name in
its configuration. Strata registers its own there; the configuration of a module whose weights are in tiles names it."""

import copy
from contextlib import ExitStack

import torch

from .. import _C
from ..model.compiling import outside_graphs
from ..model.interception import replaced
from . import functions
from .functions import Groups, Members, has_grouped_product


class TilingRule:
    """The way in which modules of a class use their parameters in tiles. Inherit from it, and call
    ``strata.register_tiling(Class, Rule())``. One rule serves many modules and keeps no reference to them.

    It names those of the module's parameters that it can use in tiles, ``parameters``. Its ``forward(module, tiles,
    *args, **kwargs)`` computes the module's forward with ``tiles``, {name: strata.model.tiles.Tiles} of the parameters
    that are cut; the module's others are whole. The operations of ``strata.tiles.functions`` take such a Tiles: linear,
    matmul, embedding, grouped_linear; ``apply_tile`` runs a function of your own with one tile."""

    parameters = ("weight",)

    def require(self, module):
        """Raises UsageError, with the reason, for a module that cannot be used in tiles at all."""

    def cut(self, module, name, full_name, rows, row_bytes, most):
        """[(first row, behind the last row)]: tiles of at most ``most`` bytes, which hold every row of the module's
        parameter ``name``, one of ``parameters``, once, in order. The same on every rank. ``full_name``: in the model,
        for messages; ``rows``, ``row_bytes``: of its first dimension, and of one of them."""
        return _C.cut_rows(full_name, rows, row_bytes, most)

    def install(self, module, tiles):
        """Makes the module compute with ``tiles``: puts ``forward`` in place of its own. Returns a function that undoes
        this."""
        return replaced(module, "forward", _TiledForward(self, module, tiles))


class _TiledForward:
    """Replaces a module's forward; a copy or pickle of the module gets the class's own."""

    def __init__(self, rule, module, tiles):
        self._rule, self._module, self._tiles = rule, module, tiles
        self.__wrapped__ = type(module).forward.__get__(module)  # for inspect.signature

    @outside_graphs
    def __call__(self, *args, **kwargs):
        return self._rule.forward(self._module, self._tiles, *args, **kwargs)

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self):
        return getattr, (self._module, "forward")


_by_class, _by_test = {}, []  # rules


def register_tiling(module_class, rule):
    """Lets modules of this class use their parameters in tiles. A rule for the same class replaces the earlier one.
    Call it before ``strata.initialize``, on every rank. UsageError for anything else than:

    Args:
        module_class: a class of ``torch.nn.Module``. It serves classes that inherit from it as well, unless they have a
            ``forward`` of their own. Or a function: module -> bool.
        rule: an instance of ``strata.tiles.TilingRule``.
    """
    if not isinstance(rule, TilingRule):
        raise _C.UsageError("register_tiling(ModuleClass, rule) takes an instance of a class that inherits from "
                            f"strata.tiles.TilingRule; found {rule!r}")
    if type(rule).install is TilingRule.install and not callable(getattr(rule, "forward", None)):
        raise _C.UsageError(f"register_tiling(ModuleClass, rule): {type(rule).__name__} has no forward(module, tiles, "
                            "*args, **kwargs), which computes what the module's forward does with its parameters in "
                            "tiles; strata.tiles.TilingRule says how")
    if isinstance(module_class, type):
        _by_class[module_class] = rule
    elif callable(module_class):
        _by_test.insert(0, (module_class, rule))
    else:
        raise _C.UsageError("register_tiling(ModuleClass, rule) takes a class of modules, or a function that says "
                            f"whether a module is one; found {module_class!r}")


def find_rule(module):
    """The rule of the module's class, or of the nearest class from which it inherits its forward; else that of the
    newest function that accepts the module; else None."""
    for cls in type(module).__mro__:
        if cls in _by_class:
            return _by_class[cls]
        if "forward" in cls.__dict__:  # a rule of a base class does not know this forward
            break
    return next((rule for test, rule in _by_test if test(module)), None)


_NAME = "strata_tiles"


def is_fused_experts(module):
    """Whether the module's class chooses among transformers' experts implementations."""
    marks = ("has_gate", "has_bias", "is_transposed", "config", "num_experts")
    return all(mark in module.__dict__ for mark in marks) and hasattr(module, "_apply_gate")


class ExpertsRule(TilingRule):
    """A tile is one expert or several. Where a rank gathers without the others, it gathers only the tiles that its
    tokens use."""

    parameters = ("gate_up_proj", "up_proj", "down_proj")

    def install(self, module, tiles):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # the module is of transformers

        ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
        config = copy.copy(module.config)
        config._experts_implementation = _NAME
        undo = ExitStack()
        undo.callback(replaced(module, "config", config))
        undo.callback(replaced(module, "_strata_experts", tiles))
        return undo.close


@outside_graphs
def _forward(self, hidden_states, top_k_index, top_k_weights):
    """As transformers' eager implementation, with each expert's tokens in consecutive rows. ``self``: the module of
    experts; hidden_states [tokens, width]; top_k_* [tokens, k], where the number of experts stands for none."""
    tiles = self.__dict__["_strata_experts"]
    experts = top_k_index.t().reshape(-1)  # an expert's tokens in the order of the eager implementation
    in_order, order = torch.sort(experts, stable=True)
    groups = Groups.of_sorted(in_order, self.num_experts)
    uses = _Uses(order, *top_k_index.shape)
    rows = _Moved.apply(hidden_states, uses.spread, uses.collect)
    in_order = in_order.clamp(max=self.num_experts - 1)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _project(self, tiles, name, rows, groups, in_order)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _project(self, tiles, "down_proj", rows, groups, in_order)
    weights = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0.0)
    rows = rows * weights.t().reshape(-1).index_select(0, order)[:, None]
    return _Moved.apply(rows.to(hidden_states.dtype), uses.collect, uses.spread)


class _Uses:
    """Rows for each use of an expert by a token, ordered by expert. A token has ``chosen`` uses."""

    def __init__(self, order, tokens, chosen):
        self._tokens, self._chosen = tokens, chosen
        self._token = order % tokens
        self._place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    def spread(self, values):
        """[tokens, width] to [rows, width]."""
        return values.index_select(0, self._token)

    def collect(self, rows):
        """The sum of each token's rows, in fp32 and always in the same order; ``index_add_`` on GPUs has no order."""
        return rows.index_select(0, self._place).view(self._chosen, self._tokens, rows.shape[1]).sum(0)


class _Moved(torch.autograd.Function):
    """``there(values)``; its gradient goes ``back``."""

    @staticmethod
    def forward(ctx, values, there, back):
        ctx.back = back
        return there(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def _project(self, tiles, name, rows, groups, in_order):
    if name in tiles:
        rows = functions.grouped_linear(rows, tiles[name], groups, self.is_transposed)
    else:
        weight = getattr(self, name)
        rows = _of_whole(rows, weight if self.is_transposed else weight.mT, groups)
    return rows + getattr(self, f"{name}_bias")[in_order] if self.has_bias else rows


def _of_whole(rows, matrices, groups):
    """``grouped_linear`` with a weight that is small enough to be whole; matrices: [experts, in, out]."""
    used, rest = rows[: groups.rows], rows.new_zeros(len(rows) - groups.rows, matrices.shape[2])
    if has_grouped_product(used, matrices):
        parts = [torch.nn.functional.grouped_mm(used, matrices, offs=groups.ends)]
    else:
        parts = [used[here] @ matrices[expert] for expert, here in Members(groups, 0, len(matrices)).each]
    return torch.cat([*parts, rest]) if len(rest) or len(parts) != 1 else parts[0]


class LinearRule(TilingRule):
    """A tile has rows of the weight, and computes the columns of the result for these outputs."""

    def forward(self, module, tiles, x):
        return functions.linear(x, tiles["weight"], module.bias)


class Conv1DRule(TilingRule):
    """A linear layer with a transposed weight, as in GPT-2. A tile has the rows of some inputs; results add up."""

    def forward(self, module, tiles, x):
        return functions.matmul(x, tiles["weight"], module.bias)


class EmbeddingRule(TilingRule):
    """Each tile serves the ids in its range."""

    def require(self, module):
        if module.max_norm is not None or module.sparse:
            option = "sparse=True" if module.sparse else f"max_norm={module.max_norm}"
            raise _C.UsageError(f"an embedding with {option} cannot be used in tiles: "
                                "torch changes its weight in forward, or makes a sparse gradient of it")  # fmt: skip

    def forward(self, module, tiles, ids):
        return functions.embedding(ids, tiles["weight"], module.padding_idx, module.scale_grad_by_freq)


register_tiling(torch.nn.Linear, LinearRule())
register_tiling(torch.nn.Embedding, EmbeddingRule())
register_tiling(lambda module: ("transformers.pytorch_utils", "Conv1D") in
                ((cls.__module__, cls.__name__) for cls in type(module).__mro__), Conv1DRule())  # fmt: skip
register_tiling(is_fused_experts, ExpertsRule())
