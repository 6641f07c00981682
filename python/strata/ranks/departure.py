"""How this process leaves its peers: together with them at the end of the program, or with a word about the exception
that ends it. A rank that only went away would look to them like one that died."""

import atexit
import logging
import sys
import weakref

logger = logging.getLogger("strata")

_REASON_MOST = 1000  # characters
_present = {}  # weak reference to a _C.ShardedModel -> (what shares its collectives, its saver), by time of watch()
_hook = None


def watch(core, saver=None, group=None):
    """Takes care of the end of the process until ``unwatch(core)``. An exception that ends it is told to the peers
    before ``sys.excepthook`` shows it; else the process waits for them when it exits. ``sys.exit(1)`` cannot be told
    from the end of the program, and an exception that ends a thread does not end the process.

    Args:
        core: a _C.ShardedModel; it is not kept alive, nor are its collectives.
        saver: a weak reference to what saves beside training: its ``wait_for_checkpoint()`` is called, collectively,
            before the process leaves at its end. What it raises is logged.
        group: the same object for cores of the same collectives, which meet the others once; None: a core alone.
    """
    global _hook
    if not _present:
        atexit.register(_leave_together)
        _hook = _ExceptHook()
    _present[weakref.ref(core, _remove)] = (group or object(), saver)


def unwatch(core):
    """Undoes ``watch``; nothing happens where that was done before."""
    _remove(weakref.ref(core))


def _remove(reference):
    global _hook
    if _present.pop(reference, None) is not None and not _present:
        atexit.unregister(_leave_together)
        _hook.remove()
        _hook = None


class _ExceptHook:
    """Tells peers of an uncaught exception, then calls the ``sys.excepthook`` that it stands in for."""

    def __init__(self):
        self._previous, sys.excepthook = sys.excepthook, self

    def __call__(self, kind, value, traceback):
        try:
            _tell_peers(kind, value)
        finally:
            self._previous(kind, value, traceback)

    def remove(self):
        """Restores what was before. A hook that somebody put above stays, and reaches that through this one."""
        if sys.excepthook is self:
            sys.excepthook = self._previous


def _tell_peers(kind, value):
    told = set()
    for reference, (group, _) in list(_present.items()):
        core = reference()
        if core is None or not core.alive or group in told:
            continue
        told.add(group)
        try:
            core.leave(f"{kind.__name__}: {value}"[:_REASON_MOST])
        except Exception as error:
            logger.debug("peers were not told of the %s: %s", kind.__name__, error)


def _leave_together():
    """Never raises: whatever fails here failed before, and was told then."""
    if getattr(sys, "last_value", None) is not None:
        return  # an exception ends the program, so peers are not where this rank would wait for them
    met = set()
    for reference in reversed(list(_present)):
        core = reference()
        if core is None or not core.alive:
            continue
        group, saver = _present[reference]
        try:
            if saver is not None and saver() is not None:
                saver().wait_for_checkpoint()
        except Exception as error:
            logger.error("at exit: %s: %s", type(error).__name__, error)
        try:
            core.end_trace()
            if group not in met:
                met.add(group)
                core.wait_for_all()
        except Exception as error:
            logger.debug("at exit: %s: %s", type(error).__name__, error)
        except KeyboardInterrupt:
            return
