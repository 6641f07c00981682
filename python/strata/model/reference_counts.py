"""The number of references to an item of a container. The interpreter's own share, its stack and the arguments of
calls, differs between versions of Python, so every count is compared with another one taken here."""

import sys


def references(container, key):
    """References to the item ``key`` of a dict or a list. The interpreter's own add the same number to each count, so
    counts can be compared."""
    kind = dict if isinstance(container, dict) else list
    return sys.getrefcount(kind.__getitem__(container, key))


_alone = references([object()], 0)


def is_alone(container, key):
    """Whether nothing but its container refers to the item ``key`` of a dict or a list."""
    return references(container, key) == _alone
