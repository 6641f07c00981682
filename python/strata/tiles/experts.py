"""Fused experts of transformers 5: weights [experts, out, in] that are used some experts at a time.

A module of theirs asks transformers' registry of experts implementations for its forward, by the name in its
configuration. Ours is registered there, and a module whose weights are in tiles has a configuration that names it.
"""

import copy

import torch

from . import functions
from .rules import TilingRule

_NAME = "strata_tiles"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def is_fused_experts(module):
    """Whether the module's class chooses among transformers' experts implementations."""
    marks = ("has_gate", "has_bias", "is_transposed", "config", "num_experts")
    return all(mark in module.__dict__ for mark in marks) and hasattr(module, "_apply_gate")


class ExpertsRule(TilingRule):
    """A tile is one expert or several. On one rank's own, where ranks gather alone, only those are gathered that its
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
    """As transformers' eager implementation, with an expert's tokens next to each other.

    Args:
        self: the module of experts.
        hidden_states: [tokens, width].
        top_k_index, top_k_weights: [tokens, k]; an index that is the number of experts stands for none.
    """
    tiles = self.__dict__["_strata_experts"]
    tokens, chosen = top_k_index.shape
    experts = top_k_index.t().reshape(-1)  # in the order in which eager takes an expert's tokens
    in_order, order = torch.sort(experts, stable=True)
    counts = torch.bincount(in_order, minlength=self.num_experts + 1).tolist()[: self.num_experts]
    order, in_order = order[: sum(counts)], in_order[: sum(counts)]
    token, place = order % tokens, order // tokens
    rows = hidden_states[token]
    name = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _project(self, tiles, name, rows, counts, in_order)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _project(self, tiles, "down_proj", rows, counts, in_order)
    rows = rows * top_k_weights[token, place, None]
    return torch.zeros_like(hidden_states).index_add_(0, token, rows.to(hidden_states.dtype))


def _project(self, tiles, name, rows, counts, in_order):
    if name in tiles:
        rows = functions.grouped_linear(rows, tiles[name], counts, self.is_transposed)
    else:
        weight, parts = getattr(self, name), []
        for expert, part in enumerate(rows.split(counts)):
            if part.shape[0]:
                matrix = weight[expert]
                parts.append(torch.nn.functional.linear(part, matrix.t() if self.is_transposed else matrix))
        rows = torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[2 if self.is_transposed else 1])
    return rows + getattr(self, f"{name}_bias")[in_order] if self.has_bias else rows
