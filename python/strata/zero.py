"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

from contextlib import ExitStack

import torch

from . import _C
from .config_source import read_config
from .deferred_init import DeferredInit
from .model.constructors import ConstructorWatch, ConstructorReads, open_reads
from .model.parameter import is_managed, owner_of
from .model.recording import Recording
from .model.tiles import tiles_of
from .rank_logging import show_logs
from .ranks.runtime import init_distributed, rank_and_world_size
from .tiles.host_copy import end_host_copy, values_on_host

_ITS_OWN = 0  # stands for memory of the engine


class GatheredParameters:
    """Context in which parameters are whole on every rank. At its end they are released, unless a running forward or an
    outer context holds them.

    Collective when ``modifier_rank`` is given, or when ranks gather through a process group; every rank must then enter
    with the same parameters. Contexts nest; duplicates, None and parameters that no engine owns are ignored. A
    parameter that is used in tiles is whole on the host, not on the model's device; ``strata.iter_pieces`` gives it
    piece by piece.

    Args:
        params: a Parameter, or an iterable of Parameters.
        modifier_rank: the rank whose changes count: at the end every rank gets this rank's values, in the weights and
            in the fp32 master weights. None: read only.
        fwd_module: no effect; the engine gathers parameters of other modules when they are read.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: ``modifier_rank`` is not a rank of the job; the host has no room for a parameter that is used in
            tiles. At the end with ``modifier_rank=None``: on each rank that has changed a parameter in place, or given
            it other memory (``p.data = tensor``); the change is lost where the parameter is sharded. The context does
            not see changes that autograd does not count (``p.data.mul_(2)``). At the end with a ``modifier_rank``:
            where a parameter was given a tensor of another shape or dtype.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._modifier_rank = modifier_rank
        self._by_core = {}
        self._managed = {}  # id -> parameter
        self._tiled, self._copies = {}, []  # parameters that are used in tiles, by id; those made whole on the host
        if not enabled:
            return
        world = rank_and_world_size()[1]
        if modifier_rank is not None and not 0 <= modifier_rank < world:
            raise _C.UsageError(f"modifier_rank must be a rank of this job, 0 to {world - 1}; got {modifier_rank}")
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            if tiles_of(parameter) is not None:
                self._tiled[id(parameter)] = parameter
                continue
            core, index = owner_of(parameter)
            if core is not None:
                self._by_core.setdefault(id(core), (core, set()))[1].add(index)
            if core is not None or (parameter is not None and is_managed(parameter)):
                self._managed[id(parameter)] = parameter

    def __enter__(self):
        self._held = []
        try:
            for parameter in self._tiled.values():
                if parameter.numel() == 0:
                    parameter.data = values_on_host(parameter)
                    self._copies.append(parameter)
            for core, indices in self._by_core.values():
                indices = sorted(indices)
                core.gather(indices)
                self._held.append((core, indices))
                if self._modifier_rank is not None:
                    core.wait_for_all()  # other ranks may still read the last step's values from this memory
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
                self._end_copies(self._modifier_rank)
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
            self._release()  # the gathered copies must not keep half a change

    def _put_back(self):
        for key, parameter in self._managed.items():
            core, index = owner_of(parameter)
            if core is not None and self._memory[key] == _ITS_OWN:  # else an outer context has replaced the memory
                core.put_back([index])

    def _end_copies(self, modifier_rank):
        while self._copies:
            end_host_copy(self._copies.pop(0), modifier_rank)

    def _release(self):
        self._end_copies(None)
        held, self._held = self._held, []
        for core, indices in held:
            core.release(indices, True)

    def _require_unchanged(self):
        changed = [parameter for key, parameter in self._managed.items()
                   if _version(parameter) > max(self._versions[key], parameter.__dict__.get("_strata_published", 0))
                   or _memory(parameter) not in (self._memory[key], _ITS_OWN)]
        if changed:
            core, index = owner_of(changed[0])
            first = f"'{core.parameter_name(index)}'" if core is not None else f"of shape {tuple(changed[0].shape)}"
            self._changed(f"{len(changed)} parameters were changed within GatheredParameters(modifier_rank=None), "
                          "which is for reading; pass modifier_rank=<the rank whose changes shall be everybody's>, or "
                          f"change a copy. First: {first}")
            self._put_back()

    def _changed(self, message):
        """Called where parameters were changed though they are for reading."""
        raise _C.UsageError(message)


def _version(parameter):
    return 0 if parameter.is_inference() else parameter._version


def _memory(parameter):
    """A key of a parameter's memory; it changes where a script gives the parameter other memory (``p.data = x``)."""
    core, index = owner_of(parameter)
    if core is not None and not core.replaced(index):
        return _ITS_OWN
    return parameter.untyped_storage()._cdata


__all__ = ["GatheredParameters", "Init"]

_DTYPES = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}


class Init:
    """Context that shards a module's parameters as soon as its constructor is over, so that no rank ever holds the
    whole model. ``strata.initialize`` takes the shards over, a unit at a time.

    While a constructor runs, the parameters that it or the constructor of a base class has made are whole. A child's
    parameter becomes whole when the constructor reads it (``child.weight``, ``self.parameters()``,
    ``self.apply(...)``). Values that the constructor writes count; where ranks write different values, rank 0's win.
    No other parameter is whole meanwhile: a parameter that was read is released when no rank refers to it any more, at
    the latest when the constructor ends. Afterwards change parameters within ``GatheredParameters``.

    A module that was built outside is sharded when it is attached to one that is built inside: at the end of that
    one's constructor, or of the context. The context leaves parameters on torch's device "meta", and lazy ones, alone.
    On one rank parameters stay whole; they are cast and moved to the device that the model trains on.

    A floating parameter of more elements than ``strata.init.replay_above`` has deferred initialization
    (docs/design/deferred_initialization.md): its constructor makes it without memory, and each rank computes the values
    of its own shards when the outermost constructor is over. The random numbers are not plain torch's; they follow from
    ``torch.manual_seed`` and are the same at any number of ranks. An operator that is not element-wise
    (``orthogonal_``), or that reads a value, makes the parameter whole on the host; a warning says so once.

    Collective: every rank builds the same modules, whose constructors read the same parameters. Modules that are built
    in the context live until its end. A context within another one does nothing: the outer one's settings hold.

    Args:
        module: shards this module, already built, at once.
        config_dict_or_path, config: a configuration (dict, path or JSON text) whose precision the shards get;
            "auto" values are accepted, and any stage. Without one, ``dtype`` gives the precision.
        dtype: torch.bfloat16 or torch.float16; None or torch.float32: parameters keep theirs.
        enabled: False makes the context do nothing.
        The other arguments are DeepSpeed's and have no effect here.

    Raises:
        UsageError: for another ``dtype``, and for a ``module`` that is no ``torch.nn.Module``.
        OutOfMemoryError: from a constructor, or at its end, where there is no room. A constructor that fails, with any
            exception, leaves no values behind: parameters to which the script still refers are empty.
    """

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None,
                 pin_memory=False, config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None,
                 **_ignored):
        self._enabled = enabled
        self._reads = None  # while the context is open
        if not enabled:
            return
        if module is not None and not isinstance(module, torch.nn.Module):
            raise _C.UsageError(f"zero.Init(module=...) takes a torch.nn.Module; found {type(module).__name__}")
        show_logs()
        init_distributed()
        config = config_dict_or_path if config_dict_or_path is not None else config
        if config is None and dtype not in (None, *_DTYPES):
            raise _C.UsageError(f"zero.Init(dtype=...) takes torch.float32, bfloat16 or float16; found {dtype}")
        config = _DTYPES[dtype or torch.float32] if config is None else config
        self._config = read_config(config).for_construction()
        self._deferred = DeferredInit(self._config)
        if module is not None:
            self._deferred.shard_all(module)

    def __enter__(self):
        if self._enabled and open_reads() is None:
            # Modules made outside any other's constructor. Weak references would end at different times on each rank.
            self._roots = []
            self._watch = ConstructorWatch(self._begin, self._end)
            rank, world = rank_and_world_size()
            self._recording = Recording(self._config.replay_above, self._watch.running, self._config.threads, world,
                                        self._config.partition_stream_chunk, warns=rank == 0)
            reads = ConstructorReads(self._deferred.of_all, self._recording.paused, self._tidy)
            with ExitStack() as undo:
                undo.callback(self._deferred.close)
                self._deferred.open(reads, self._recording)
                undo.callback(reads.close, failed=True)
                reads.open()
                self._watch.install()
                undo.callback(self._watch.remove)
                self._recording.open()
                undo.pop_all()
            self._reads = reads
        return self

    def __exit__(self, kind, value, traceback):
        if self._reads is None:
            return
        reads, self._reads = self._reads, None
        roots, self._roots = self._roots, []
        failed = True
        with ExitStack() as ends:  # each of them runs, also when another one raises
            ends.callback(self._deferred.close)
            ends.callback(lambda: reads.close(failed))
            try:
                self._recording.close(failed=kind is not None)
            finally:
                self._watch.remove()
            for root in roots if kind is None else []:
                self._deferred.shard_all(root)
            failed = kind is not None

    def _begin(self, module):
        with self._recording.paused():
            if self._watch.running:  # parameters that the parent has made by now need not stay whole meanwhile
                parent = self._watch.running[-1]
                own = parent.__dict__.get("_parameters", {})
                self._deferred.shard_unused([(parent, name) for name in own])
            self._deferred.begin(module)
            self._reads.enter()

    def _end(self, module, failed):
        is_root, is_complete = not self._watch.running, False
        with self._recording.paused():
            try:
                if not failed:
                    self._deferred.shard_complete(module, is_root)
                    self._deferred.wait_for(module)
                    if is_root:
                        self._deferred.shard_waiting(module)
                        self._roots.append(module)
                    is_complete = True
            finally:
                self._reads.leave(failed)
                if not is_complete:
                    self._deferred.discard(module)
                if is_root:
                    self._deferred.waiting = []
                    self._recording.finish(not is_complete)

    def _tidy(self):
        """Shards parameters that were materialized and are not used any more, before another one is materialized."""
        if self._recording.materialized and self._watch.running:
            with self._recording.paused():
                homes = [(m, name) for m in self._deferred.waiting for name in m._parameters]
                self._recording.materialized = not self._deferred.shard_unused(homes)  # some have values by now
