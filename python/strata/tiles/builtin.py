"""Strata's own tiling rules: linear layers, embeddings, transformers' Conv1D and its fused experts."""

import torch

from .. import _C
from . import functions
from .experts import ExpertsRule, is_fused_experts
from .rules import TilingRule, register_tiling


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


def _is_conv1d(module):
    return any(cls.__module__ == "transformers.pytorch_utils" and cls.__name__ == "Conv1D"
               for cls in type(module).__mro__)  # fmt: skip


register_tiling(torch.nn.Linear, LinearRule())
register_tiling(torch.nn.Embedding, EmbeddingRule())
register_tiling(_is_conv1d, Conv1DRule())
register_tiling(is_fused_experts, ExpertsRule())
