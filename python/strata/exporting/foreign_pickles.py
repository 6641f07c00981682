"""``torch.save`` for values whose classes are DeepSpeed's, without DeepSpeed.

DeepSpeed's files hold a few objects of its own classes. A pickle has only the module and the name of a class, so a
process without the library can write such objects.
"""

import pickle
import types

import torch


class ForeignClass:
    """A class of another library.

    Args:
        module, name: str, by which the reader of the file imports the class.
    """

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, **attributes):
        """An object of the class, without a call of its constructor; ``attributes`` become its ``__dict__``."""
        return ForeignObject(self, attributes)


class ForeignObject:
    """An object of a ``ForeignClass``."""

    def __init__(self, cls, attributes):
        self.cls, self.attributes = cls, attributes


class _Pickler(pickle._Pickler):
    """The pickler of the standard library that is written in Python: its C twin refuses names that it cannot import."""

    def save(self, value, *arguments, **options):
        if not isinstance(value, (ForeignClass, ForeignObject)):
            super().save(value, *arguments, **options)
        elif id(value) in self.memo:
            self.write(self.get(self.memo[id(value)][0]))
        elif isinstance(value, ForeignClass):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            self.memoize(value)
        else:
            self.save(value.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(value)
            self.save(value.attributes)
            self.write(pickle.BUILD)


_PICKLE = types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")


def save(value, path):
    """Writes ``value`` to the file ``path`` as ``torch.save`` does; parts of it may be ``ForeignObject``s."""
    torch.save(value, path, pickle_module=_PICKLE)
