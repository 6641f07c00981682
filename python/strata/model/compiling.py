"""A model's modules as torch.compile and torch's checkpoint_wrapper treat them. Imports no Dynamo: it takes seconds."""

import functools
import sys
import weakref

import torch

from .. import _C
from ..views import logger

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # names of the module within torch's wrappers
_REASON = "Strata computes this outside of graphs"


def outside_graphs(function):
    """``function`` for torch.compile: a graph ends before its call, and nothing in it is traced. Torch's own decorator
    would import Dynamo."""
    disabled = []

    @functools.wraps(function)
    def outside(*args, **kwargs):
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and not disabled:
            disabled.append(dynamo.disable(function, reason=_REASON))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    outside._torchdynamo_disable, outside._torchdynamo_disable_msg = True, _REASON
    return outside


def plain_name(name):
    """The name of a module or a tensor without those that wrappers put into it: of ``torch.compile(module)``, and of
    ``checkpoint_wrapper(module)``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def unwrapped(module):
    """The module within such wrappers; ``module`` itself, where there are none."""
    while inner := next(filter(None, map(module._modules.get, WRAPPED)), None):
        module = inner
    return module


def compiler_of(compiled):
    """torch's object that compiles a module, or that has made a function; None where there is none."""
    if isinstance(compiled, torch.nn.Module):
        return compiler_of(compiled._compiled_call_impl) or compiled.__dict__.get("dynamo_ctx")
    closure = getattr(getattr(compiled, "get_compiler_config", None), "__closure__", None)  # it holds the object
    return closure[0].cell_contents if closure else None


def _makes_cuda_graphs(compiler):
    backend = getattr(compiler, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    options, inductor = getattr(backend, "config", None), sys.modules.get("torch._inductor.config")
    by_inductor = isinstance(options, dict) and options.get(
        "triton.cudagraphs", inductor is not None and inductor.triton.cudagraphs)
    return by_inductor or getattr(backend, "compiler_name", None) == "cudagraphs"


def require_compilable(path, module, compiler, cut, cuda_graphs=False):
    """Raises UsageError, with the module's path or else its class, where ``compiler``, of ``compiler_of``, would make
    graphs of it that cannot be. ``cut``: the model's ``strata.tiles.cutting.Cut``, or None. ``cuda_graphs``: whether
    the configuration allows those."""
    path = path or type(module).__name__
    if not cuda_graphs and _makes_cuda_graphs(compiler):
        raise _C.UsageError(f"'{path}' is compiled: CUDA graphs keep the addresses of weights, which the engine may "
                            "move; write \"strata\": {\"cuda_graphs\": true}, or else mode \"default\" or "
                            "\"max-autotune-no-cudagraphs\", and no \"triton.cudagraphs\"")
    whole = cut is not None and getattr(compiler, "fullgraph", False)
    inside = {id(inner) for inner in module.modules()} if whole else ()
    for tiles in cut.all if whole else ():
        if any(id(home) in inside for home, _ in tiles.homes):
            raise _C.UsageError(f"'{path}' cannot be one graph: '{tiles.name}' in it is used in tiles, outside of "
                                "graphs; compile it without fullgraph, or leave the parameter whole by "
                                "strata.tiles.match")


def is_one_graph(module, parent):
    """Whether ``module``, a child of ``parent``, is compiled, and should be gathered as one: within it the engine's
    hooks would end graphs. A module that holds lists of blocks is not, unless it is a member of such a list itself."""
    if parent is None or not module._modules or compiler_of(module) is None:
        return False
    lists = (inner for inner in module.modules() if isinstance(inner, _LISTS))
    return isinstance(parent, _LISTS) or not any(member._modules for inner in lists for member in inner.children())


def mark_steps(engine):
    """Tells torch's CUDA graphs where forward begins anew: at calls of the model without a forward before them that
    still waits for backward. Torch's own guess takes each block of an evaluation for a new step, which may overwrite
    the results of the one before. Returns a function that undoes this. The hook does not keep ``engine``."""
    reference, waits = weakref.ref(engine), [None]  # the backward passes before the last forward with gradients

    @outside_graphs
    def mark(*_):
        engine, trees = reference(), sys.modules.get("torch._inductor.cudagraph_trees")
        if engine is None:
            return
        done = engine.core.backward_passes
        if trees is not None and waits[0] != done:
            trees.mark_step_begin()
        if torch.is_grad_enabled():
            waits[0] = done

    return engine.module.register_forward_pre_hook(mark, prepend=True).remove


def check_at_first_forward(engine):
    """Checks once, when the model's forward is called first, how the script has compiled modules since ``initialize``,
    and its autocast. Returns a function that undoes this. The hook does not keep ``engine``."""
    reference = weakref.ref(engine)

    @outside_graphs
    def check(module, _):
        engine, named = reference(), [(plain_name(path), inner) for path, inner in module.named_modules()]
        for path, inner in named:
            require_compilable(path, inner, compiler_of(inner), engine and engine._cut,
                               engine and engine._config.cuda_graphs)
        module._forward_pre_hooks.pop(handle.id, None)  # also of a copy of the model
        if engine and engine.global_rank == 0 and engine._config.stage == 3 and engine.world_size > 1:
            _log_costs(engine, named)

    handle = engine.module.register_forward_pre_hook(check, prepend=True)
    return handle.remove


def _log_costs(engine, named_modules):
    """Warns of graphs that end at each parameter, and of weights that autocast keeps."""
    scopes = {id(module) for module in engine._scope_modules}
    for path, module in named_modules[1:] if engine.zero_allgather_sequential() else ():
        if compiler_of(module) is not None and any(id(m) in scopes for m in module.modules() if m is not module):
            logger.warning("'%s' was compiled after initialize, and stage3_allgather_sequential gathers its modules "
                           "one by one: its graph ends at each of them. Compile it before initialize, which then "
                           "gathers it as one", path)
            break
    kind = engine.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else engine._config.autocast_dtype
    if dtype is not None and any(parameter.dtype.itemsize > 2 for _, parameter, *_ in engine._described):
        logger.warning("autocast at stage 3 keeps 16-bit copies of weights from forward to backward, beside the memory "
                       "that the engine reports: of the whole model, where it recomputes no activations. bf16.enabled "
                       "trains with weights in bf16, and needs no copies")


def regions_of(scope_modules):
    """[torch.nn.Module]: blocks, and owners of parameters outside of them, which torch.compile makes graphs of, each by
    itself. [] for a model without blocks. ``scope_modules``: those that the engine gathers as one."""
    inside = {id(module): [m for m in module.modules() if m is not module] for module in scope_modules}
    regions = [m for m in scope_modules if not any(id(inner) in inside for inner in inside[id(m)])]
    if not any(inner._parameters for module in regions for inner in inside[id(module)]):
        return []
    # Dynamo begins no graph in torch's own modules, such as torch.nn.Linear.
    return [module for module in regions if not type(module).forward.__module__.startswith("torch.nn.")]
