"""Parameters that were sharded when their module was made, and are whole while a constructor reads them."""

import gc
import threading
import weakref

import torch

from . import failed_constructors
from .owner import clear_owner, owner_of, set_owner
from .ownership import discard_values
from .parameter import unmark_managed
from .reference_counts import references

_here = threading.local()  # .looks: the Looks of the zero.Init that is open in this thread


def open_looks():
    """The ``Looks`` of the ``zero.Init`` that is open in this thread, or None."""
    return getattr(_here, "looks", None)


class ShardedConstruction(dict):
    """The ``_parameters`` of a module with parameters that ``zero.Init`` has sharded: a read gathers.

    Within ``zero.Init`` a parameter stays whole as ``Looks`` documents; there ``items()`` and ``values()`` gather, too,
    while a constructor runs. Elsewhere it stays whole until the next backward pass ends, or under no_grad until the
    next forward begins.
    """

    def __getitem__(self, name):
        looks = open_looks()
        if looks is not None:
            looks.tidy()
        parameter = super().__getitem__(name)
        if parameter is not None and parameter.numel() == 0:
            core, index = owner_of(parameter)
            if core is not None and looks is not None:
                looks.look(core, index)
            elif core is not None:
                core.read(index)
        return parameter

    def get(self, name, default=None):
        return self[name] if name in self else default

    def items(self):
        looks = open_looks()
        if looks is None or not looks.in_constructor:
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

    def give_up(self):
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


class Looks:
    """Gathers parameters of complete modules that a constructor reads. At their release every rank gets the values that
    rank 0 has written. Release comes with the next read once no rank refers to them, else at the end of the constructor
    that read them first. Collective: constructors read the same parameters on all ranks. References may differ (cycles
    that wait for the collector, kept exceptions), so ranks agree on each release.

    Args:
        of_all: a callable that takes a list of bools, as long on every rank, and returns for each whether it is true on
            all of them. Collective.
        paused: makes a context in which operators are not recorded.
        tidy: called before a parameter of a complete module is read.
    """

    def __init__(self, of_all, paused, tidy):
        self._of_all, self._paused, self.tidy = of_all, paused, tidy
        self._born = {}  # id(core) -> _ConstructedShards
        # id(core) -> _ConstructedShards, by the constructor that looked first; the outermost is the context
        self._frames = [{}]

    @property
    def in_constructor(self):
        """Whether a constructor runs."""
        return len(self._frames) > 1

    def open(self):
        """Makes ``open_looks()`` return this object in this thread."""
        _here.looks = self
        failed_constructors.free()

    def close(self, failed):
        """Ends ``open()`` and every look."""
        _here.looks = None
        while self._frames:
            self.leave(failed)
        failed_constructors.free()
        born, self._born = list(self._born.values()), {}
        orphaned = [one.is_orphaned() for one in born]
        for one, is_orphaned in zip(born, orphaned if failed else self._of_all(orphaned)):
            if is_orphaned:
                one.forget()

    def add(self, core, parameters, homes, number):
        """``core``, a _C.ShardedModel, has sharded one constructor's ``parameters``, which are at ``homes``:
        [(_parameters of a module, name)]. ``number``: of the first of their modules, as ``take_failed`` has it."""
        self._born[id(core)] = _ConstructedShards(core, parameters, homes, number)

    def take_failed(self, number):
        """Called when a constructor has failed: returns [_ConstructedShards] of the module of this number and of
        later ones, which are part of it. This object forgets them."""
        failed = {key: born for key, born in self._born.items() if born.number >= number}
        for key in failed:
            del self._born[key]
            for frame in self._frames:
                frame.pop(key, None)
        return list(failed.values())

    def enter(self):
        """Called when a constructor begins."""
        self._release_unused()
        self._frames.append({})

    def leave(self, failed):
        """Called when the innermost constructor ends. ``failed``: with an exception; its values do not count then."""
        ended = [born for born in self._frames.pop().values() if born.core.alive]
        # A view that lives on needs the memory. A rank that failed does not ask the others: they may not come.
        free = [not born.is_viewed() for born in ended]
        for born, is_free in zip(ended, free if failed else self._of_all(free)):
            self._release(born, publish=not failed, release=is_free)

    def drop(self, core):
        """Called when ``core`` ends."""
        self._born.pop(id(core), None)

    def look(self, core, index):
        """Makes all parameters of ``core`` whole; ``index``: the parameter that is read."""
        born = self._born.get(id(core))
        if born is None:  # the core is an engine's, or of an earlier context
            core.read(index)
            return
        with self._paused():
            self._release_unused()
            core.gather(born.indices)
            self._frames[-1][id(core)] = born

    def _release_unused(self):
        looked_at = [(frame, key, born) for frame in self._frames for key, born in frame.items()]
        unused = self._of_all([not born.is_used() for _, _, born in looked_at])
        for (frame, key, born), is_unused in zip(looked_at, unused):
            if is_unused:
                del frame[key]
                self._release(born, publish=True, release=True)

    @staticmethod
    def _release(born, publish, release):
        if not born.core.alive:
            return
        try:
            if publish:
                born.core.publish(born.indices, 0)
        finally:
            born.core.put_back(born.indices)
            if release:
                born.core.release(born.indices, True)


def _references_while_shared():
    """``references()`` of an object to which only a dict and C++ refer."""
    with torch.enable_grad():
        parameters = {"": torch.nn.Parameter(torch.ones(1, device="cpu"))}
        graph = parameters[""] * 2
        return references(parameters, "") if graph.requires_grad else 0
