"""Constructors under ``zero.Init``: observes their beginnings and ends, gathers the sharded parameters that they read,
and discards the shards of those that fail."""

import functools
import gc
import itertools
import sys
import threading
import time
import types
import weakref

import torch
import torch.distributed as dist

from .parameter import clear_owner, discard_values, owner_of, set_owner, unmark_managed


def references(container, key):
    """References to the item ``key`` of a dict or a list; the interpreter's own add the same number to each count."""
    kind = dict if isinstance(container, dict) else list
    return sys.getrefcount(kind.__getitem__(container, key))


_alone = references([object()], 0)


def is_alone(container, key):
    """Whether nothing but its container refers to the item ``key`` of a dict or a list."""
    return references(container, key) == _alone


class ConstructorWatch:
    """While it is installed, it calls ``begin(module)`` before the constructor of every module that this thread makes,
    and ``end(module, failed)`` after it. Calls of base classes' constructors are part of a constructor. ``running``:
    [torch.nn.Module] whose constructors run now, the innermost last.

    It wraps every class of modules, also those that are declared meanwhile. Other threads are not affected."""

    def __init__(self, begin, end):
        self._begin, self._end = begin, end
        self._thread = threading.get_ident()
        self._wrapped = []  # (class, its own __init__, ours), while it is installed
        self.running = []

    def install(self):
        """Wraps all classes. Where it cannot wrap one, it wraps none."""
        own = torch.nn.Module.__dict__.get("__init_subclass__")
        self._declaration = own

        def declared(cls, **arguments):
            if own is None:
                super(torch.nn.Module, cls).__init_subclass__(**arguments)
            else:
                own.__get__(None, cls)(**arguments)
            self._wrap(cls)

        torch.nn.Module.__init_subclass__ = classmethod(declared)
        waiting, seen = [torch.nn.Module], set()
        try:
            while waiting:
                cls = waiting.pop()
                if cls not in seen:
                    seen.add(cls)
                    self._wrap(cls)
                    waiting.extend(type.__subclasses__(cls))
        except BaseException:
            self.remove()
            raise

    def remove(self):
        """Undoes ``install``. A decorator may have kept a wrapped constructor, which only calls the original then."""
        if self._declaration is None:
            del torch.nn.Module.__init_subclass__
        else:
            torch.nn.Module.__init_subclass__ = self._declaration
        for cls, original, ours in self._wrapped:
            if cls.__dict__.get("__init__") is ours:
                cls.__init__ = original
        self._wrapped = []

    def _wrap(self, cls):
        original = cls.__dict__.get("__init__")
        if not isinstance(original, types.FunctionType) or cls.__module__.startswith("torch.jit"):
            return

        @functools.wraps(original)
        def __init__(module, *args, **kwargs):
            watches = self._wrapped and threading.get_ident() == self._thread
            if not watches or any(module is running for running in self.running):
                original(module, *args, **kwargs)
                return
            self._begin(module)
            self.running.append(module)
            failed = True
            try:
                original(module, *args, **kwargs)
                failed = False
            finally:
                self.running.pop()
                self._end(module, failed)

        cls.__init__ = __init__
        self._wrapped.append((cls, original, __init__))


_here = threading.local()  # .reads: the ConstructorReads of the zero.Init that is open in this thread


def open_reads():
    """The ``ConstructorReads`` of the ``zero.Init`` that is open in this thread, or None."""
    return getattr(_here, "reads", None)


class ShardedConstruction(dict):
    """The ``_parameters`` of a module with parameters that ``zero.Init`` has sharded: a read gathers.

    Within ``zero.Init`` a parameter stays whole as ``ConstructorReads`` documents; there ``items()`` and ``values()``
    gather, too, while a constructor runs. Elsewhere it stays whole until the next backward pass ends, or under no_grad
    until the next forward begins."""

    def __getitem__(self, name):
        reads = open_reads()
        if reads is not None:
            reads.tidy()
        parameter = super().__getitem__(name)
        if parameter is not None and parameter.numel() == 0:
            core, index = owner_of(parameter)
            if core is not None and reads is not None:
                reads.gather(core, index)
            elif core is not None:
                core.read(index)
        return parameter

    def get(self, name, default=None):
        return self[name] if name in self else default

    def items(self):
        reads = open_reads()
        if reads is None or not reads.in_constructor:
            return super().items()
        return [(name, self[name]) for name in self]

    def values(self):
        return [value for _, value in self.items()]


class _ConstructedShards:
    """The parameters of one constructor, and their homes at its end; ``number``: of its module."""

    def __init__(self, core, parameters, homes, number):
        self.core, self.homes, self.number = core, homes, number
        self.indices = list(range(len(parameters)))
        self._usual = _references_while_shared()
        self._parameters = [weakref.ref(parameter) for parameter in parameters]  # weak, so is_used() counts others

    def is_used(self):
        """Whether anything besides its module refers to one of them, or to a view of it."""
        referred = (name in home and references(home, name) > self._usual for home, name in self.homes)
        return any(referred) or self.is_viewed()

    def is_viewed(self):
        return any(self.core.held_elsewhere(index) for index in self.indices)

    def is_orphaned(self):
        """Whether other parameters have taken the place of all of them, as tied ones do, and nothing refers to them."""
        parameters = [reference() for reference in self._parameters]
        ids = {id(parameter) for parameter in parameters}
        if None in parameters or any(id(dict.get(home, name)) in ids for home, name in self.homes):
            return False
        return len(gc.get_referrers(*parameters)) == 1  # the list above

    def discard(self):
        """Frees the shards. Parameters to which the script still refers are empty."""
        parameters = [p for p in (reference() for reference in self._parameters) if p is not None]
        self.core = None
        for parameter in parameters:
            clear_owner(parameter)
            unmark_managed(parameter)
        discard_values(parameters)

    def forget(self):
        """Frees the shards of orphaned parameters."""
        for index, reference in enumerate(self._parameters):
            set_owner(reference(), self.core, index)


class ConstructorReads:
    """Gathers parameters of complete modules that a constructor reads. At their release every rank gets the values that
    rank 0 has written. Release comes with the next read once no rank refers to them, else at the end of the constructor
    that read them first. Collective: constructors read the same parameters on all ranks. References may differ (cycles
    that wait for the collector, kept exceptions), so ranks agree on each release.

    Args: ``DeferredInit.of_all``; ``Recording.paused``; a callable that is called before a parameter of a complete
    module is read.
    """

    def __init__(self, of_all, paused, tidy):
        self._of_all, self._paused, self.tidy = of_all, paused, tidy
        self._constructed = {}  # id(core) -> _ConstructedShards
        # id(core) -> _ConstructedShards, by the constructor that read first; the outermost is the context
        self._frames = [{}]

    in_constructor = property(lambda self: len(self._frames) > 1)

    def open(self):
        """Makes ``open_reads()`` return this object in this thread."""
        _here.reads = self
        free_discarded()

    def close(self, failed):
        """Ends ``open()`` and every read."""
        _here.reads = None
        while self._frames:
            self.leave(failed)
        free_discarded()
        constructed, self._constructed = list(self._constructed.values()), {}
        orphaned = [shards.is_orphaned() for shards in constructed]
        for shards, is_orphaned in zip(constructed, orphaned if failed else self._of_all(orphaned)):
            if is_orphaned:
                shards.forget()

    def add(self, core, parameters, homes, number):
        """``core``, a _C.ShardedModel, has sharded one constructor's ``parameters``, which are at ``homes``:
        [(_parameters of a module, name)]. ``number``: of the first of their modules, as ``take_failed`` has it."""
        self._constructed[id(core)] = _ConstructedShards(core, parameters, homes, number)

    def take_failed(self, number):
        """Called when a constructor has failed: returns [_ConstructedShards] of the module of this number and of
        later ones, which are part of it. This object forgets them."""
        failed = {key: shards for key, shards in self._constructed.items() if shards.number >= number}
        for key in failed:
            del self._constructed[key]
            for frame in self._frames:
                frame.pop(key, None)
        return list(failed.values())

    def enter(self):
        self._release_unused()
        self._frames.append({})

    def leave(self, failed):
        """Called when the innermost constructor ends. ``failed``: with an exception; its values do not count then."""
        ended = [shards for shards in self._frames.pop().values() if shards.core.alive]
        # A view that lives on needs the memory. A rank that failed does not ask the others: they may not come.
        free = [not shards.is_viewed() for shards in ended]
        for shards, is_free in zip(ended, free if failed else self._of_all(free)):
            self._release(shards, publish=not failed, release=is_free)

    def drop(self, core):
        self._constructed.pop(id(core), None)

    def gather(self, core, index):
        """Makes all parameters of ``core`` whole; ``index``: the parameter that is read."""
        shards = self._constructed.get(id(core))
        if shards is None:  # the core is an engine's, or of an earlier context
            core.read(index)
            return
        with self._paused():
            self._release_unused()
            core.gather(shards.indices)
            self._frames[-1][id(core)] = shards

    def _release_unused(self):
        gathered = [(frame, key, shards) for frame in self._frames for key, shards in frame.items()]
        unused = self._of_all([not shards.is_used() for _, _, shards in gathered])
        for (frame, key, shards), is_unused in zip(gathered, unused):
            if is_unused:
                del frame[key]
                self._release(shards, publish=True, release=True)

    @staticmethod
    def _release(shards, publish, release):
        if not shards.core.alive:
            return
        try:
            if publish:
                shards.core.publish(shards.indices, 0)
        finally:
            shards.core.put_back(shards.indices)
            if release:
                shards.core.release(shards.indices, True)


def _references_while_shared():
    """``references()`` of an object to which only a dict and C++ refer."""
    with torch.enable_grad():
        parameters = {"": torch.nn.Parameter(torch.ones(1, device="cpu"))}
        graph = parameters[""] * 2
        return references(parameters, "") if graph.requires_grad else 0


_PATIENCE_S = 5.0  # how long a rank that failed waits for the others to fail, too
_count = itertools.count()  # of failures; the same on all ranks, where all fail alike
_waiting = []  # (mark in the store, the object that has the shards)


def discard_failed(constructed, where, device):
    """Discards ``constructed``, [objects with shards, ``is_viewed()`` and ``discard()``], of a constructor that failed
    at ``where``. The shards are freed when every rank has failed there, since a slower rank may still read them, and
    when no view of their memory exists: here, or by a later ``free_discarded()``."""
    if not constructed:
        return
    mark = f"strata.init/failed/{next(_count)}/{where}"
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # this rank's reads of its peers have ended
    _ranks_at(mark, 1)
    _waiting.extend((mark, shards) for shards in constructed)
    deadline = time.monotonic() + _PATIENCE_S
    while not _all_are_at(mark) and time.monotonic() < deadline:
        time.sleep(0.002)
    free_discarded()


def free_discarded():
    """Frees the shards that can be freed now. Does not wait for other ranks."""
    arrived = {mark: _all_are_at(mark) for mark in {mark for mark, _ in _waiting}}
    staying = []
    while _waiting:
        mark, shards = _waiting.pop()
        if not shards.core.alive:
            continue
        if not arrived[mark] or shards.is_viewed():
            staying.append((mark, shards))
        else:
            shards.discard()
    _waiting.extend(staying)


def _all_are_at(mark):
    return dist.is_initialized() and _ranks_at(mark, 0) >= dist.get_world_size()


def _ranks_at(mark, more):
    return dist.distributed_c10d._get_default_store().add(mark, more)
