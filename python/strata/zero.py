"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

import types

import torch

from . import _C
from .config_source import read_config
from .model.constructors import ConstructorWatch
from .model.looks import BornParameters, Looks, open_looks, references
from .model.model_input import describe_modules, describe_parameters
from .model.owner import owner_of
from .model.ownership import take_ownership
from .model.parameter import is_managed, mark_managed
from .model.placement import choose_device
from .ranks.runtime import init_distributed, make_collectives, rank_and_world_size, telling_the_others

__all__ = ["GatheredParameters", "Init"]

_ITS_OWN = 0  # memory of the engine's
_ALONE = 2  # references to what only the dict has that is asked
_DTYPES = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}


class GatheredParameters:
    """Context in which parameters are whole on every rank. At its end they are released, unless a running forward or
    an outer context holds them.

    Collective when ``modifier_rank`` is given, or when ranks gather through a process group; every rank
    must then enter with the same parameters. Contexts nest; duplicates, None and parameters that no engine
    owns are ignored.

    Args:
        params: a Parameter, or an iterable of Parameters.
        modifier_rank: the rank whose changes count: at the end what it holds becomes everybody's value, in
            the weights and the fp32 master weights. None: read only.
        fwd_module: accepted for DeepSpeed's sake; parameters used by other modules are gathered as they are
            read.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: ``modifier_rank`` is not a rank of the job. At the end, on each rank that has changed a parameter in
            place, or given it other memory (``p.data = tensor``), though ``modifier_rank`` is None; the change is lost
            where the parameter is sharded. Changes in place past autograd's count of them (``p.data.mul_(2)``) are not
            seen. With ``modifier_rank``, where a parameter was given a tensor of another shape or dtype.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._modifier_rank = modifier_rank
        self._by_core = {}
        self._managed = {}  # id -> parameter
        if not enabled:
            return
        _require_rank(modifier_rank)
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            core, index = owner_of(parameter)
            if core is not None:
                self._by_core.setdefault(id(core), (core, set()))[1].add(index)
            if core is not None or (parameter is not None and is_managed(parameter)):
                self._managed[id(parameter)] = parameter

    def __enter__(self):
        self._held = []
        try:
            for core, indices in self._by_core.values():
                indices = sorted(indices)
                core.gather(indices)
                self._held.append((core, indices))
                if self._modifier_rank is not None:
                    core.wait_for_all()  # others may still read what the last step left in the memory that is edited
        except BaseException:
            self._release()
            raise
        self._versions, self._memory = (
            {key: state(parameter) for key, parameter in self._managed.items()} for state in (_version, _memory))
        return self

    def __exit__(self, kind, value, traceback):
        try:
            if kind is not None:
                self._put_back()
            elif self._modifier_rank is not None:
                for core, indices in self._held:
                    core.publish(indices, self._modifier_rank)
                for parameter in self._managed.values():
                    parameter._strata_published = _version(parameter)
            else:
                self._require_unchanged()
        except BaseException:
            self._put_back()
            raise
        finally:
            self._release()  # half a change must not stay in the gathered copies
        return False

    def _put_back(self):
        for key, parameter in self._managed.items():
            core, index = owner_of(parameter)
            if core is not None and self._memory[key] == _ITS_OWN:  # else an outer context's
                core.put_back([index])

    def _release(self):
        held, self._held = self._held, []
        for core, indices in held:
            core.release(indices, True)

    def _require_unchanged(self):
        changed = [
            parameter
            for key, parameter in self._managed.items()
            if _version(parameter) > max(self._versions[key], parameter.__dict__.get("_strata_published", 0))
            or _memory(parameter) not in (self._memory[key], _ITS_OWN)
        ]
        if changed:
            core, index = owner_of(changed[0])
            first = f"'{core.parameter_name(index)}'" if core is not None else f"of shape {tuple(changed[0].shape)}"
            self._changed(
                f"{len(changed)} parameters were changed within GatheredParameters(modifier_rank=None), which is for "
                "reading; pass modifier_rank=<the rank whose changes shall be everybody's>, or change a copy. First: "
                f"{first}"
            )
            self._put_back()

    def _changed(self, message):
        """What happens where they have."""
        raise _C.UsageError(message)


def _require_rank(modifier_rank):
    world = rank_and_world_size()[1]
    if modifier_rank is not None and not 0 <= modifier_rank < world:
        raise _C.UsageError(f"modifier_rank must be a rank of this job, 0 to {world - 1}; got {modifier_rank}")


def _version(parameter):
    return 0 if parameter.is_inference() else parameter._version


def _memory(parameter):
    """Tells apart what a script gives a parameter (``p.data = tensor``) from what it had."""
    core, index = owner_of(parameter)
    if core is not None and not core.replaced(index):
        return _ITS_OWN
    return parameter.untyped_storage()._cdata


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
