"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

from contextlib import ExitStack

import torch

from . import _C
from .deferred_init import DeferredInit
from .config_source import read_config
from .gathered_parameters import GatheredParameters
from .model.constructors import ConstructorWatch
from .model.looks import Looks, open_looks
from .model.recording import Recording
from .rank_logging import show_logs
from .ranks.runtime import init_distributed, rank_and_world_size

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

    A floating parameter of more elements than ``strata.init.replay_above`` has deferred initialization: its constructor
    makes it without memory. ``Init`` records the element-wise operators of its own and its parents' constructors
    (``normal_``, ``uniform_``, ``trunc_normal_``, ``fill_``, and the functions of ``torch.nn.init`` and transformers
    that use these). It replays them when the outermost constructor is over: each rank computes the values of its own
    shards, ``stage3_partition_stream_chunk_size`` bytes at a time. The random numbers are not plain torch's; they
    follow from ``torch.manual_seed`` and are the same at any number of ranks. An operator that cannot be replayed
    (``orthogonal_``, or one that reads a value) makes the parameter whole on the host; a warning says so once.

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
        OutOfMemoryError: from a constructor, or at its end, where there is no room for shards or pieces, or for
            parameters that must be whole. A constructor that fails, with any exception, leaves no values behind:
            parameters to which the script still refers are empty.
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
        if not enabled:
            return
        if module is not None and not isinstance(module, torch.nn.Module):
            raise _C.UsageError(f"zero.Init(module=...) takes a torch.nn.Module; found {type(module).__name__}")
        show_logs()
        init_distributed()
        self._config = _parse(config_dict_or_path if config_dict_or_path is not None else config, dtype)
        self._births = DeferredInit(self._config)
        if module is not None:
            self._births.shard_all(module)

    def __enter__(self):
        if self._enabled and open_looks() is None:
            # Modules made outside any other's constructor. Weak references would end at different times on each rank.
            self._roots = []
            self._watch = ConstructorWatch(self._begin, self._end)
            rank, world = rank_and_world_size()
            self._recording = Recording(
                self._config.replay_above, self._watch.running, self._config.threads, world,
                self._config.partition_stream_chunk, tells=rank == 0,
            )
            looks = Looks(self._births.of_all, self._recording.paused, self._tidy)
            with ExitStack() as undo:
                undo.callback(self._births.close)
                self._births.open(looks, self._recording)
                undo.callback(looks.close, failed=True)
                looks.open()
                self._watch.install()
                undo.callback(self._watch.remove)
                self._recording.open()
                undo.pop_all()
            self._looks = looks
        return self

    def __exit__(self, kind, value, traceback):
        if self._looks is None:
            return False
        looks, self._looks = self._looks, None
        roots, self._roots = self._roots, []
        failed = True
        with ExitStack() as ends:  # each of them runs, also when another one raises
            ends.callback(self._births.close)
            ends.callback(lambda: looks.close(failed))
            with ExitStack() as patches:
                patches.callback(self._watch.remove)
                self._recording.close(failed=kind is not None)
            for root in roots if kind is None else []:
                self._births.shard_all(root)
            failed = kind is not None
        return False

    def _begin(self, module):
        with self._recording.paused():
            if self._watch.running:  # parameters that the parent has made by now need not stay whole meanwhile
                parent = self._watch.running[-1]
                own = parent.__dict__.get("_parameters", {})
                self._births.shard_unused([(parent, name) for name in own])
            self._births.begin(module)
            self._looks.enter()

    def _end(self, module, failed):
        is_root, is_complete = not self._watch.running, False
        with self._recording.paused():
            try:
                if not failed:
                    self._births.shard_complete(module, is_root)
                    self._births.wait_for(module)
                    if is_root:
                        self._births.shard_waiting(module)
                        self._roots.append(module)
                    is_complete = True
            finally:
                self._looks.leave(failed)
                if not is_complete:
                    self._births.give_up(module)
                if is_root:
                    self._births.drop_waiting()
                    self._recording.settle(not is_complete)

    def _tidy(self):
        """Shards parameters that were materialized and are not used any more, before another one is materialized."""
        if self._recording.materialized and self._watch.running:
            with self._recording.paused():
                self._recording.materialized = not self._births.shard_unused(self._births.waiting())


def _parse(config, dtype):
    if config is None:
        if dtype not in (None, *_DTYPES):
            raise _C.UsageError(f"zero.Init(dtype=...) takes torch.float32, bfloat16 or float16; found {dtype}")
        config = _DTYPES[dtype or torch.float32]
    return read_config(config).for_construction()
