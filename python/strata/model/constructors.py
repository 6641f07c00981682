"""Observes the beginning and the end of every module's constructor, of any class."""

import functools
import threading
import types

import torch


class ConstructorWatch:
    """While it is installed, it calls ``begin(module)`` before the constructor of every module that this thread makes,
    and ``end(module, failed)`` after it. Calls of base classes' constructors are part of a constructor.

    It wraps every class of modules, also those that are declared meanwhile. Other threads are not affected.

    Args:
        begin, end: callables.

    Attributes:
        running: [torch.nn.Module] whose constructors run now, the innermost last.
    """

    def __init__(self, begin, end):
        self._begin, self._end = begin, end
        self._thread = threading.get_ident()
        self._wrapped = []  # (class, its own __init__, ours)
        self._watches = False
        self.running = []

    def install(self):
        """Wraps all classes. Where it cannot wrap one, it wraps none."""
        self._watches = True
        own = torch.nn.Module.__dict__.get("__init_subclass__")
        self._declaration = own

        def declared(cls, **arguments):
            if own is None:
                super(torch.nn.Module, cls).__init_subclass__(**arguments)
            else:
                own.__get__(None, cls)(**arguments)
            self._wrap(cls)

        torch.nn.Module.__init_subclass__ = classmethod(declared)
        try:
            self._wrap_all()
        except BaseException:
            self.remove()
            raise

    def remove(self):
        """Undoes ``install``. A class's decorator may have kept a wrapped constructor; it only calls the original from
        then on."""
        self._watches = False
        if self._declaration is None:
            del torch.nn.Module.__init_subclass__
        else:
            torch.nn.Module.__init_subclass__ = self._declaration
        for cls, original, ours in self._wrapped:
            if cls.__dict__.get("__init__") is ours:
                cls.__init__ = original
        self._wrapped = []

    def _wrap_all(self):
        waiting, seen = [torch.nn.Module], set()
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                self._wrap(cls)
                waiting.extend(type.__subclasses__(cls))

    def _wrap(self, cls):
        original = cls.__dict__.get("__init__")
        if not isinstance(original, types.FunctionType) or cls.__module__.startswith("torch.jit"):
            return

        @functools.wraps(original)
        def __init__(module, *args, **kwargs):
            of_this_thread = self._watches and threading.get_ident() == self._thread
            if not of_this_thread or any(module is running for running in self.running):
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
