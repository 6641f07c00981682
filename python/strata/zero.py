"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

import types

import torch

from . import _C
from .config_source import read_config
from .gathered_parameters import GatheredParameters
from .model.constructors import ConstructorWatch
from .model.looks import BornParameters, Looks, open_looks, references
from .model.model_input import describe_modules, describe_parameters
from .model.owner import owner_of
from .model.ownership import take_ownership
from .model.parameter import is_managed, mark_managed
from .model.placement import choose_device
from .ranks.runtime import init_distributed, make_collectives, rank_and_world_size, telling_the_others

__all__ = ["GatheredParameters", "Init"]

_ALONE = 2  # references to what only the dict has that is asked
_DTYPES = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}


class Init:
    """Context that shards a module's parameters as soon as its constructor is over, so that no rank ever holds the
    whole model. ``strata.initialize`` takes the shards over, a unit at a time.

    While a constructor runs, its class and those that inherit from it see the parameters that it has made itself, and
    those of its children as soon as they read them (``child.weight``, ``self.parameters()``, ``self.apply(...)``), and
    what they write counts: in the end rank 0's values win. Nothing else is whole meanwhile: a parameter that was looked
    at is released when no rank refers to it any more, at the latest when the constructor ends. Afterwards change
    parameters within ``GatheredParameters``.

    Modules that were built elsewhere are sharded when they are attached to one that is built inside, at the end of its
    constructor or of the context. Parameters on torch's device "meta", and lazy ones, stay as they are. On one rank
    parameters stay whole; they are cast and moved to where they train.

    Collective: every rank builds the same modules, whose constructors look at the same parameters. What is built in the
    context lives until its end. A context within another one does nothing of its own: the outer one's settings hold.

    Args:
        module: shards this module, already built, at once.
        config_dict_or_path, config: a configuration (dict, path or JSON text) whose precision the shards get;
            "auto" values are accepted, and any stage. Without one, ``dtype`` says the precision.
        dtype: torch.bfloat16 or torch.float16; None or torch.float32: parameters keep theirs.
        enabled: False makes the context do nothing.
        The other arguments are DeepSpeed's and have no effect here.

    Raises:
        UsageError: for another ``dtype``, and for a ``module`` that is none.
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
        self._looks = None  # while the context is open
        self._count = 0
        # Made with the first parameters, which say where all of them lie.
        self._device = self._runtime = self._collectives = None
        if not enabled:
            return
        if module is not None and not isinstance(module, torch.nn.Module):
            raise _C.UsageError(f"zero.Init(module=...) takes a torch.nn.Module; found {type(module).__name__}")
        init_distributed()
        self._config = _parse(config_dict_or_path if config_dict_or_path is not None else config, dtype)
        if module is not None:
            self._shard_all(module)

    def __enter__(self):
        if self._enabled and open_looks() is None:
            # Modules made outside any other's constructor. No weak references: ranks free them at times of their own.
            self._roots = []
            self._watch = ConstructorWatch(self._begin, self._end)
            self._looks = Looks(self._of_all)
            self._looks.open()
            self._watch.install()
        return self

    def __exit__(self, kind, value, traceback):
        if self._looks is None:
            return False
        self._watch.remove()
        try:
            for root in self._roots if kind is None else []:
                self._shard_all(root)
        finally:
            self._roots = []
            looks, self._looks = self._looks, None
            looks.close(failed=kind is not None)
        return False

    def _begin(self, module):
        if self._watch.running:  # what that constructor has made by now need not stay whole meanwhile
            parent = self._watch.running[-1]
            own = parent.__dict__.get("_parameters", {})
            homes = [(parent, name) for name in own if _can_be_sharded(dict.__getitem__(own, name))]
            self._connect(homes)
            unused = self._of_all([references(own, name) == _ALONE for _, name in homes])
            self._shard([home for home, is_unused in zip(homes, unused) if is_unused])
        self._looks.enter()

    def _end(self, module, failed):
        try:
            if not failed:
                self._shard_all(module)
                if not self._watch.running:
                    self._roots.append(module)
        finally:
            self._looks.leave(failed)

    def _connect(self, homes):
        """Chooses the device, and joins the ranks, when there is a first parameter among [(module, name)]."""
        if self._device is not None or not homes:
            return
        with telling_the_others():
            parameters = {id(p): p for p in (dict.__getitem__(m._parameters, name) for m, name in homes)}
            device = choose_device(self._config, _Flat(homes, list(parameters.values())))
        if rank_and_world_size()[1] > 1:
            self._collectives = make_collectives(self._config, device)
            self._runtime = _C.Runtime(device, threads=1, world_size=1).joined(self._collectives)
        self._device = device

    def _of_all(self, facts):
        """[bool], whether each of these is true on every rank. Collective, unless there are none."""
        if self._collectives is None or not facts:
            return facts
        texts = self._collectives.all_gather_text("".join("01"[fact] for fact in facts))
        return [all(text[i] == "1" for text in texts) for i in range(len(facts))]

    def _shard_all(self, module):
        self._shard([(m, name) for m in module.modules() for name in m._parameters])
        for m in module.modules():  # parametrizations take parameters over that were sharded elsewhere
            if type(m._parameters) is dict and any(p is not None and owner_of(p)[0] for p in m._parameters.values()):
                _read_born(m)

    def _shard(self, homes):
        """Shards what nobody has sharded yet of the parameters at [(module, name)]."""
        homes = [(m, name) for m, name in homes if _can_be_sharded(dict.__getitem__(m._parameters, name))]
        new = {id(p): p for p in (dict.__getitem__(m._parameters, name) for m, name in homes)}
        if not new:
            return
        self._connect(homes)
        if self._collectives is None:
            for parameter in new.values():
                _place(parameter, self._device, self._config.weight_dtype(parameter.dtype))
            return
        tree = _Flat(homes, list(new.values()))
        parameters = describe_parameters(tree, {})
        core = _C.ShardedModel(
            parameters, describe_modules(tree), self._config, "none", self._runtime, f"init.{self._count}"
        )
        self._count += 1
        take_ownership(core, parameters, stage=3, weakly=False)
        for module in {id(m): m for m, _ in homes}.values():
            _read_born(module)
        if self._looks is not None:
            self._looks.add(core, list(new.values()), [(m._parameters, name) for m, name in homes])
        core.free_originals()


class _Flat:
    """A ModelTree of one module that has these parameters, named after where they are: [(module, name)]."""

    def __init__(self, homes, parameters):
        names = {id(dict.__getitem__(m._parameters, name)): f"{type(m).__name__}/{name}" for m, name in homes}
        self.parameters = [(f"{names[id(p)]}/{number}", p) for number, p in enumerate(parameters)]
        self.modules = [("", types.SimpleNamespace(_parameters=dict(self.parameters)), None)]


def _read_born(module):
    if not isinstance(module._parameters, BornParameters):
        module.__dict__["_parameters"] = BornParameters(dict.items(module._parameters))


def _can_be_sharded(parameter):
    return (
        parameter is not None
        and owner_of(parameter)[0] is None
        and not is_managed(parameter)
        and not parameter.is_meta
        and not isinstance(parameter, torch.nn.parameter.UninitializedParameter)
    )


def _place(parameter, device, dtype):
    parameter.data = parameter.data.to(device, dtype)
    mark_managed(parameter, parameter.shape)


def _parse(config, dtype):
    if config is None:
        if dtype not in (None, *_DTYPES):
            raise _C.UsageError(f"zero.Init(dtype=...) takes torch.float32, bfloat16 or float16; found {dtype}")
        config = _DTYPES[dtype or torch.float32]
    return read_config(config).for_construction()
