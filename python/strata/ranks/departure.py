"""Ends a process in agreement with its peers. At the end of the program it waits for them; where an exception or an
exit ends it, it notifies them of the reason. Without this, peers would take a rank that has left for one that died."""

import atexit
import os
import sys
import weakref

from ..views import logger

_REASON_MOST = 1000  # characters
_present = {}  # weak reference to a _C.ShardedModel -> (what shares its collectives, its engine), by time of watch()
_hooks = ()
_last_error = None  # str of the last exception that went through an engine
_failed_exit = None  # str, of the last ``sys.exit``, if it was with a failure


def watch(core, engine=None, group=None):
    """Handles the end of the process until ``unwatch(core)``. Where an exception ends the process, the peers get its
    message before ``sys.excepthook`` shows it. Else the process waits for the peers when it exits; a peer that does not
    come gets the place of the ``sys.exit`` and the last error. An exception that ends a thread does not count.
    ``core``: a _C.ShardedModel; this function keeps neither it nor its collectives alive. ``engine``: a weak reference
    to the engine, whose ``end_watching()`` and, collectively, ``wait_for_checkpoint()`` are called at the end of the
    process. Their exceptions are logged. ``group``: the same object for cores of the same collectives, which share one
    sync point; None: a core alone."""
    global _hooks, _failed_exit
    if not _present:
        atexit.register(_leave)
        _hooks, _failed_exit = (_Hook("excepthook", _notify_peers), _Hook("exit", _record_exit)), None
    _present[weakref.ref(core, _remove)] = (group or object(), engine)


def engines():
    """[engine]: the engines of this process that are not destroyed, oldest first."""
    found = [engine() for _, engine in _present.values() if engine is not None]
    return [engine for engine in found if engine is not None and engine.core.alive]


def record_error(error):
    """Remembers an exception that goes through an engine: peers get its message if the script catches it and ends."""
    global _last_error
    _last_error = f"{type(error).__name__}: {error}"


def unwatch(core):
    """Undoes ``watch``; a second call does nothing."""
    _remove(weakref.ref(core))


def _remove(reference):
    global _hooks
    if _present.pop(reference, None) is not None and not _present:
        atexit.unregister(_leave)
        for hook in _hooks:
            hook.remove()
        _hooks = ()


class _Hook:
    """Stands in for a function of ``sys``, and calls it after ``first``, with the same arguments."""

    def __init__(self, name, first):
        self._name, self._first, self._previous = name, first, getattr(sys, name)
        setattr(sys, name, self)

    def __call__(self, *args):
        try:
            self._first(*args)
        finally:
            self._previous(*args)

    def remove(self):
        """Restores the function from before. One that other code has put above stays, and calls it through this."""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._previous)


def _record_exit(status=None):
    global _failed_exit
    caller = sys._getframe(2)  # beyond the hook
    where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
    _failed_exit = None if status in (None, 0) else f"sys.exit({status!r}) at {where}"


def _notify_peers(kind, value, traceback=None):
    notified = set()
    for reference, (group, _) in list(_present.items()):
        core = reference()
        if core is None or not core.alive or group in notified:
            continue
        notified.add(group)
        try:
            core.leave(f"{kind.__name__}: {value}"[:_REASON_MOST])
        except Exception as error:
            logger.debug("peers were not notified of the %s: %s", kind.__name__, error)


def _leave():
    """Waits for the peers. Never raises: an error here has been reported before."""
    # Where an exception ends the program, the peers are not at this sync point.
    in_agreement = getattr(sys, "last_value", None) is None
    left = set()
    for reference in reversed(list(_present)):
        core = reference()
        if core is None or not core.alive:
            continue
        group, engine = _present[reference]
        try:
            if in_agreement:
                words = f"its program ended after {getattr(core, 'global_steps', 0)} steps"
                words += f" by {_failed_exit}" if _failed_exit else ""
                words += f"; its last error was {_last_error}" if _last_error is not None else ""
                core.announce_departure(words[:_REASON_MOST])
            if engine is not None and engine() is not None:
                engine().end_watching(wait=in_agreement)
                if in_agreement:
                    engine().wait_for_checkpoint()
        except Exception as error:
            logger.error("at exit: %s: %s", type(error).__name__, error)
        if not in_agreement:
            continue
        try:
            core.end_trace()
            if group not in left:
                left.add(group)
                core.depart()
        except Exception as error:
            logger.debug("at exit: %s: %s", type(error).__name__, error)
        except KeyboardInterrupt:
            return
