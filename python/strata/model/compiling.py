"""The modules of a model as torch.compile sees them. Imports no Dynamo, which takes seconds."""

import functools
import sys


def outside_graphs(function):
    """``function`` for torch.compile: a graph ends before its call, and nothing in it is traced. Torch's own decorator
    would import Dynamo."""
    disabled = functools.cache(lambda dynamo: dynamo.disable(function))

    @functools.wraps(function)
    def outside(*args, **kwargs):
        dynamo = sys.modules.get("torch._dynamo")
        return (function if dynamo is None else disabled(dynamo))(*args, **kwargs)

    outside._torchdynamo_disable, outside._torchdynamo_disable_msg = True, "strata computes this outside of graphs"
    return outside


def regions_of(scope_modules):
    """[torch.nn.Module]: blocks, and owners of parameters outside of them, which torch.compile makes graphs of, each by
    itself. [] for a model without blocks. ``scope_modules``: those that the engine gathers as one."""
    inside = {id(module): [m for m in module.modules() if m is not module] for module in scope_modules}
    regions = [m for m in scope_modules if not any(id(inner) in inside for inner in inside[id(m)])]
    if not any(inner._parameters for module in regions for inner in inside[id(module)]):
        return []
    # Dynamo begins no graph in torch's own modules, such as torch.nn.Linear.
    return [module for module in regions if not type(module).forward.__module__.startswith("torch.nn.")]
