"""Observes the begin and the end of every module's constructor, of any class."""

import functools
import threading
import types

import torch


class ConstructorWatch:
    """While it is installed, every module that this thread makes is told of: ``begin(module)`` before its constructor
    runs, ``end(module, failed)`` after it. Constructors of base classes that a constructor calls are part of it.

    Every class of modules is wrapped, and those that are declared meanwhile. Other threads notice nothing.

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
        """From now on. Where a class cannot be wrapped, none is."""
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
        """Undoes ``install``. A decorator of a class may have kept one of our constructors; from now on that one only
        calls the original."""
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
