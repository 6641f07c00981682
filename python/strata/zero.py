"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from . import _C
from .config_source import read_config
from .model.interception import intercept
from .model.model_input import ModelTree, describe_modules, describe_parameters
from .model.ownership import owner_of, take_ownership
from .model.placement import choose_device
from .ranks.runtime import init_distributed, make_collectives, telling_the_others

__all__ = ["GatheredParameters", "Init"]

_DTYPES = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}


class GatheredParameters:
    """Context in which parameters are whole on every rank.

    Collective when ``modifier_rank`` is given, or when ranks gather through a process group; every rank
    must then enter with the same parameters. Contexts nest; duplicates, None and parameters that no engine
    owns are ignored.

    Args:
        params: a Parameter, or an iterable of Parameters.
        modifier_rank: the rank whose changes count: at the end what it holds becomes everybody's value, in
            the weights and the fp32 master weights. None: read only; changes are lost at the end.
        fwd_module: accepted for DeepSpeed's sake; parameters used by other modules are gathered as they are
            read.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: ``modifier_rank`` is not a rank of the job.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._modifier_rank = modifier_rank
        self._by_core = {}
        if not enabled:
            return
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            core, index = owner_of(parameter)
            if core is not None:
                self._by_core.setdefault(id(core), (core, set()))[1].add(index)

    def __enter__(self):
        self._held = []
        for core, indices in self._by_core.values():
            indices = sorted(indices)
            core.gather(indices)
            self._held.append((core, indices))
        return self

    def __exit__(self, kind, value, traceback):
        held, self._held = self._held, []
        published = False
        try:
            if kind is None and self._modifier_rank is not None:
                for core, indices in held:
                    core.publish(indices, self._modifier_rank)
                published = True
        finally:
            for core, indices in held:
                core.release(indices, not published)  # half a change must not stay in the gathered copies
        return False


class Init:
    """Context that shards a module's parameters as soon as the module is added to another one, so that no
    rank ever holds the whole model, at most one module's own parameters. Rank 0's values win.
    ``strata.initialize`` takes the shards over, a unit at a time. Inside, parameters may be read as usual
    (they are gathered on the spot); change them within ``GatheredParameters``.

    Collective: every rank builds the same modules. Nested contexts are harmless.

    Args:
        module: shards this module, already built, at once.
        config_dict_or_path, config: a configuration (dict, path or JSON text) whose precision the shards get;
            "auto" values are accepted. Without one, ``dtype`` says the precision.
        dtype: torch.float32 (default), torch.bfloat16 or torch.float16.
        enabled: False makes the context do nothing.
        The other arguments are DeepSpeed's and have no effect here.
    """

    def __init__(
        self,
        module=None,
        data_parallel_group=None,
        mem_efficient_linear=True,
        remote_device=None,
        pin_memory=False,
        config_dict_or_path=None,
        config=None,
        enabled=True,
        dtype=None,
        mpu=None,
        **_ignored,
    ):
        self._enabled = enabled
        self._hook = None
        self._roots = []
        self._count = 0
        if not enabled:
            return
        init_distributed()
        self._config = _parse(config_dict_or_path if config_dict_or_path is not None else config, dtype)
        self._runtime = None  # made with the first module, which says where all of them lie
        if module is not None:
            self._shard(module)

    def __enter__(self):
        if self._enabled:
            self._hook = register_module_module_registration_hook(self._registered)
        return self

    def __exit__(self, kind, value, traceback):
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if kind is None:
            for parent in self._roots:
                self._shard(parent)
        self._roots = []
        return False

    def _registered(self, parent, name, child):
        """Called where ``parent.name = child``: the child is complete, the parent is not yet."""
        if child is not None:
            self._shard(child)
        if not any(parent is root for root in self._roots):
            self._roots.append(parent)
        self._roots = [root for root in self._roots if root is not child]

    def _make_runtime(self, tree):
        with telling_the_others():
            device = choose_device(self._config, tree)
        return _C.Runtime(device, threads=1, world_size=1).joined(make_collectives(self._config, device))

    def _shard(self, module):
        new = [p for p in module.parameters() if owner_of(p)[0] is None]
        if not new or not all(p.is_floating_point() for p in new):
            return
        tree = ModelTree(_OwnParameters(module))
        if self._runtime is None:
            self._runtime = self._make_runtime(tree)
        parameters = describe_parameters(tree, {})
        core = _C.ShardedModel(
            parameters, describe_modules(tree), self._config, "none", self._runtime, f"init.{self._count}"
        )
        self._count += 1
        take_ownership(core, parameters)
        own = {id(p) for p in new}
        owners = [m for m in module.modules() if any(id(p) in own for p in m._parameters.values())]
        intercept(core, owners, scopes=False)
        core.free_originals()


class _OwnParameters(torch.nn.Module):
    """The parameters of a module that no engine owns yet, and nothing else of it."""

    def __init__(self, module):
        super().__init__()
        for path, parameter in module.named_parameters():
            if owner_of(parameter)[0] is None:
                self.register_parameter(path.replace(".", "/"), parameter)


def _parse(config, dtype):
    if config is None:
        config = {"zero_optimization": {"stage": 3}, **_DTYPES[dtype or torch.float32]}
    return read_config(config)
