"""Ends the process groups over which ranks exchange bytes: with the engine that uses them, at the latest with the
program. Threads of gloo release tensors that Python owns; one that does so while the interpreter ends aborts the
process. A destroyed group keeps its threads while any reference to it is left, such as the defaults of
``torch.distributed.nn.functional``, so Strata takes the object with the threads out of the group."""

import atexit
import logging
import weakref

import torch.distributed as dist

from .. import _C

logger = logging.getLogger("strata")

_used = []  # [UsedGroups], oldest first
_defaults = []  # [(a weak reference to a default process group, whether Strata has made it)]


class UsedGroups:
    """The process groups behind some collectives. Those of gloo were made for these collectives, and end with them.

    Attributes:
        backends: the _C.UsedBackends of these collectives; None before they are there.
    """

    def __init__(self):
        for earlier in list(_used):  # some belong to engines without any reference
            if not earlier.in_use():
                earlier.let_go()
        self.backends = None
        _used.append(self)

    def in_use(self):
        """Whether the collectives still exist."""
        return self.backends is not None and self.backends.in_use()

    def let_go(self):
        """Ends the threads that work for the collectives, which raise CommError from then on. Waits for operations that
        this rank has started. A second call does nothing."""
        if self in _used:
            _used.remove(self)
        if self.backends is not None:
            self.backends.let_go()


def record_default(group, made):
    """Records the default process group, whose threads end with the program at the latest. Where Strata has ``made``
    it, the end of the program destroys it, unless the script has done so."""
    if all(known() is not group for known, _ in _defaults):
        _defaults.append((weakref.ref(group), made))


def _is_registered(group):
    return group in dist.distributed_c10d._world.pg_map


def _destroy(group):
    try:
        if _is_registered(group):
            dist.destroy_process_group(group)
        _C.release_group(group)
    except Exception as error:  # peers that died, or a GPU that is lost: an earlier message has reported it
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
        elif "nccl" not in dist.get_backend_config(group):  # the script must destroy a group with NCCL itself
            _C.release_group(group)
