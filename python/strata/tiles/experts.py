"""Fused experts of transformers 5: uses weights [experts, out, in] some experts at a time.

Such a module takes its forward from transformers' registry of experts implementations, by the name in its
configuration. Strata registers its own there; the configuration of a module whose weights are in tiles names it.
"""

import copy

import torch

from . import functions
from .grouped import Groups, has_grouped_product
from .rules import TilingRule

_NAME = "strata_tiles"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def is_fused_experts(module):
    """Whether the module's class chooses among transformers' experts implementations."""
    marks = ("has_gate", "has_bias", "is_transposed", "config", "num_experts")
    return all(mark in module.__dict__ for mark in marks) and hasattr(module, "_apply_gate")


class ExpertsRule(TilingRule):
    """A tile is one expert or several. Where a rank gathers without the others, it gathers only the tiles that its
    tokens use."""

    parameters = _WEIGHTS

    def install(self, module, tiles):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # the module is of transformers

        ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
        before = module.config
        module.config = copy.copy(before)
        module.config._experts_implementation = _NAME
        module.__dict__["_strata_experts"] = tiles

        def take_back():
            module.config = before
            module.__dict__.pop("_strata_experts", None)

        return take_back


def _forward(self, hidden_states, top_k_index, top_k_weights):
    """As transformers' eager implementation, with each expert's tokens in consecutive rows.

    Args:
        self: the module of experts.
        hidden_states: [tokens, width].
        top_k_index, top_k_weights: [tokens, k]; an index that is the number of experts stands for none.
    """
    tiles = self.__dict__["_strata_experts"]
    experts = top_k_index.t().reshape(-1)  # an expert's tokens in the order of the eager implementation
    in_order, order = torch.sort(experts, stable=True)
    groups = Groups.of_sorted(in_order, self.num_experts)
    uses = _Uses(order, *top_k_index.shape)
    rows = _Spread.apply(hidden_states, uses)
    in_order = in_order.clamp(max=self.num_experts - 1)
    name = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _project(self, tiles, name, rows, groups, in_order)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _project(self, tiles, "down_proj", rows, groups, in_order)
    weights = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0.0)
    rows = rows * weights.t().reshape(-1).index_select(0, order)[:, None]
    return _Collect.apply(rows.to(hidden_states.dtype), uses)


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


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, uses):
        ctx.uses = uses
        return uses.spread(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.uses.collect(grad), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, uses):
        ctx.uses = uses
        return uses.collect(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.uses.spread(grad), None


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
        parts = [used[here] @ matrices[expert] for expert, here in groups.of(0, len(matrices)).each]
    return torch.cat([*parts, rest]) if len(rest) or len(parts) != 1 else parts[0]
