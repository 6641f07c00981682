"""When the process groups end over which ranks exchange bytes: with the engine that uses them, and with the program at
the latest. Threads of gloo release tensors that Python owns; one that does so while the interpreter ends aborts the
process. A group that is destroyed keeps its threads as long as something refers to it, such as the defaults of
``torch.distributed.nn.functional``, so what has threads is taken from it."""

import atexit
import logging
import weakref

import torch.distributed as dist

from .. import _C

logger = logging.getLogger("strata")

_used = []  # [UsedGroups], in the order in which they were made
_defaults = []  # [(a weak reference to a default process group, whether Strata has made it)]


class UsedGroups:
    """The groups that carry the operations of some collectives. Those of gloo were made for these, and end with them.

    Attributes:
        backends: the _C.UsedBackends of these collectives; None before they are there.
    """

    def __init__(self):
        for earlier in list(_used):  # of engines to which nothing refers any more
            if not earlier.in_use():
                earlier.let_go()
        self.backends = None
        _used.append(self)

    def in_use(self):
        """Whether the collectives are left."""
        return self.backends is not None and self.backends.in_use()

    def let_go(self):
        """The collectives raise CommError from now on, and threads that worked for them end. Waits for operations that
        this rank has started. Nothing happens where that was done before."""
        if self in _used:
            _used.remove(self)
        if self.backends is not None:
            self.backends.let_go()


def note_default(group, made):
    """The default process group, whose threads end with the program at the latest. Where Strata has ``made`` it, it is
    destroyed then, unless the script does so itself."""
    if all(known() is not group for known, _ in _defaults):
        _defaults.append((weakref.ref(group), made))


def _is_registered(group):
    return group in dist.distributed_c10d._world.pg_map


def _destroy(group):
    try:
        if _is_registered(group):
            dist.destroy_process_group(group)
        _C.release_group(group)
    except Exception as error:  # peers that died, or a GPU that is lost: who failed has said so
        logger.debug("a process group could not be destroyed: %s", error)


@atexit.register  # with this module, before there are engines: so after they have left, for the last hook runs first
def _end():
    for used in reversed(list(_used)):
        used.let_go()
    for known, made in _defaults:
        group = known()
        if group is None:
            continue
        if made or not _is_registered(group):
            _destroy(group)
        elif "nccl" not in dist.get_backend_config(group):  # NCCL wants its own end, which is the script's
            _C.release_group(group)
