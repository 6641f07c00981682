"""Experts as modules of their own, as models were before transformers fused them: many small parameters.

They serve to measure how an engine's start depends on the number of tensors. The values stay the same.
"""

import torch


class _Expert(torch.nn.Module):
    """One expert's three projections, over copies of its slices."""

    def __init__(self, gate_up, down):
        super().__init__()
        gate, up = gate_up.chunk(2, dim=0)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
            linear.weight = torch.nn.Parameter(weight.detach().clone())
            setattr(self, name, linear)


class Experts(torch.nn.Module):
    """Stands in for transformers' fused experts of Qwen3 and its like."""

    def __init__(self, fused):
        super().__init__()
        self.each = torch.nn.ModuleList(_Expert(g, d) for g, d in zip(fused.gate_up_proj, fused.down_proj))
        self.act_fn = fused.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.each):
            token, place = torch.where(top_k_index == number)
            x = hidden_states[token]
            y = expert.down_proj(self.act_fn(expert.gate_proj(x)) * expert.up_proj(x))
            result.index_add_(0, token, (y * top_k_weights[token, place, None]).to(result.dtype))
        return result


def unfuse(model):
    """Replaces every module of fused experts; one at a time, so little more memory is needed."""
    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "gate_up_proj") and getattr(child.gate_up_proj, "dim", lambda: 0)() == 3:
                setattr(module, name, Experts(child))
