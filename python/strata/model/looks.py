"""Parameters that were sharded when their module was made, and are whole while somebody looks at them."""

import gc
import sys
import threading
import weakref

import torch

from .owner import owner_of, set_owner

_here = threading.local()  # .looks: the Looks of the zero.Init that is open in this thread


def open_looks():
    """The ``Looks`` of the ``zero.Init`` that is open in this thread, or None."""
    return getattr(_here, "looks", None)


class BornParameters(dict):
    """The ``_parameters`` of a module that has parameters of this kind: those that are read are gathered.

    Within ``zero.Init`` they stay whole as ``Looks`` says; there also ``items()`` and ``values()`` gather, as long as a
    constructor runs. Elsewhere they stay until the next backward pass ends, or under no_grad the next forward begins.
    """

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if parameter is not None and parameter.numel() == 0:
            core, index = owner_of(parameter)
            looks = open_looks()
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


class _Born:
    """The parameters of one constructor, and where they were when it was over."""

    def __init__(self, core, parameters, homes):
        self.core, self.homes = core, homes
        self.indices = list(range(len(parameters)))
        self._usual = _references_while_shared()
        self._parameters = [weakref.ref(parameter) for parameter in parameters]  # which is_used() does not count

    def is_used(self):
        """Whether somebody refers to one of them besides its module, or to a view of it."""
        referred = (name in home and references(home, name) > self._usual for home, name in self.homes)
        return any(referred) or self.is_viewed()

    def is_viewed(self):
        return any(self.core.held_elsewhere(index) for index in self.indices)

    def forget_if_orphaned(self):
        """Frees the shards where other parameters have taken the place of all of them, as tied ones do."""
        parameters = [reference() for reference in self._parameters]
        ids = {id(parameter) for parameter in parameters}
        if None in parameters or any(id(dict.get(home, name)) in ids for home, name in self.homes):
            return
        if len(gc.get_referrers(*parameters)) > 1:  # the list above
            return
        for index, parameter in enumerate(parameters):
            set_owner(parameter, self.core, index)


class Looks:
    """What constructors look at of modules that are complete. It is whole then, and what rank 0 writes to it becomes
    everybody's value when it is released: at the next look where nobody refers to it any more, else at the end of the
    constructor that looked first. Collective: constructors look at the same parameters on all ranks.
    """

    def __init__(self):
        self._born = {}  # id(core) -> _Born
        self._frames = [{}]  # id(core) -> _Born, by the constructor that looked first; the outermost is the context

    @property
    def in_constructor(self):
        """Whether a constructor runs."""
        return len(self._frames) > 1

    def open(self):
        """From now on ``open_looks()`` gives these, in this thread."""
        _here.looks = self

    def close(self, failed):
        """Ends ``open()`` and every look."""
        _here.looks = None
        while self._frames:
            self.leave(failed)
        while self._born:
            self._born.popitem()[1].forget_if_orphaned()

    def add(self, core, parameters, homes):
        """``core``, a _C.ShardedModel, has sharded one constructor's ``parameters``, which are at ``homes``:
        [(_parameters of a module, name)]."""
        self._born[id(core)] = _Born(core, parameters, homes)

    def enter(self):
        """A constructor begins."""
        self._release_unused()
        self._frames.append({})

    def leave(self, failed):
        """The innermost constructor ends. ``failed``: with an exception, so that what it wrote does not count."""
        for born in self._frames.pop().values():
            self._release(born, failed)

    def look(self, core, index):
        """Makes all that ``core`` has sharded whole; ``index``: the parameter that is wanted."""
        born = self._born.get(id(core))
        if born is None:  # of an engine, or of an earlier context
            core.read(index)
            return
        self._release_unused()
        core.gather(born.indices)
        self._frames[-1][id(core)] = born

    def _release_unused(self):
        for frame in self._frames:
            for key, born in list(frame.items()):
                if not born.is_used():
                    del frame[key]
                    self._release(born, False)

    def _release(self, born, failed):
        if not born.core.alive:
            return
        try:
            if not failed:
                born.core.publish(born.indices, 0)
        finally:
            if not born.is_viewed():  # else a view outlives the constructor, and needs the memory
                born.core.release(born.indices, True)


def references(parameters, name):
    """How many references there are to the item ``name`` of the dict ``parameters``, this call's among them."""
    return sys.getrefcount(dict.__getitem__(parameters, name))


def _references_while_shared():
    """``references()`` of what nobody but a dict refers to, and C++."""
    with torch.enable_grad():
        parameters = {"": torch.nn.Parameter(torch.ones(1, device="cpu"))}
        graph = parameters[""] * 2
        return references(parameters, "") if graph.requires_grad else 0
