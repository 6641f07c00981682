"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

from contextlib import ExitStack

import torch

from . import _C
from .births import Births
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

    While a constructor runs, its class and those that inherit from it see the parameters that it has made itself, and
    those of its children as soon as they read them (``child.weight``, ``self.parameters()``, ``self.apply(...)``), and
    what they write counts: in the end rank 0's values win. Nothing else is whole meanwhile: a parameter that was looked
    at is released when no rank refers to it any more, at the latest when the constructor ends. Afterwards change
    parameters within ``GatheredParameters``.

    Modules that were built elsewhere are sharded when they are attached to one that is built inside, at the end of its
    constructor or of the context. Parameters on torch's device "meta", and lazy ones, stay as they are. On one rank
    parameters stay whole; they are cast and moved to where they train.

    A floating parameter of more elements than ``strata.init.replay_above`` is born without memory. What its own and its
    parents' constructors do to it element by element (``normal_``, ``uniform_``, ``trunc_normal_``, ``fill_``, and what
    ``torch.nn.init`` and transformers make of these) is written down, and replayed when the outermost constructor is
    over: each rank makes what its shards hold, ``stage3_partition_stream_chunk_size`` bytes at a time. Its random
    numbers are not plain torch's; they follow from ``torch.manual_seed`` and are the same at any number of ranks. What
    cannot be replayed (``orthogonal_``, a value that is read) makes the parameter whole on the host, which is said
    once.

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
        OutOfMemoryError: from a constructor, or at its end, where there is no room for shards or pieces, or for what
            must be whole. Nothing stays of what a constructor that fails has made, whatever it raises: parameters that
            somebody still refers to are empty.
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
        self._births = Births(self._config)
        if module is not None:
            self._births.shard_all(module)

    def __enter__(self):
        if self._enabled and open_looks() is None:
            # Modules made outside any other's constructor. No weak references: ranks free them at times of their own.
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
        with ExitStack() as ends:  # each of them, whatever the others raise
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
            if self._watch.running:  # what that constructor has made by now need not stay whole meanwhile
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
        """Shards what was made real and is not used any more, before the next one is."""
        if self._recording.made_real and self._watch.running:
            with self._recording.paused():
                self._recording.made_real = not self._births.shard_unused(self._births.waiting())


def _parse(config, dtype):
    if config is None:
        if dtype not in (None, *_DTYPES):
            raise _C.UsageError(f"zero.Init(dtype=...) takes torch.float32, bfloat16 or float16; found {dtype}")
        config = _DTYPES[dtype or torch.float32]
    return read_config(config).for_construction()
