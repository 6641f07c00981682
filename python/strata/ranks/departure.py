"""How this process leaves its peers: together with them at the end of the program, or with a word about the exception
or the exit that ends it. A rank that only went away would look to them like one that died, and one that waits for them
at its end like one that does something else."""

import atexit
import logging
import os
import sys
import weakref

logger = logging.getLogger("strata")

_REASON_MOST = 1000  # characters
_present = {}  # weak reference to a _C.ShardedModel -> (what shares its collectives, its engine), by time of watch()
_hooks = ()
_last_error = None  # str of the last exception that went through an engine


def watch(core, engine=None, group=None):
    """Takes care of the end of the process until ``unwatch(core)``. An exception that ends it is told to the peers
    before ``sys.excepthook`` shows it; else the process waits for them when it exits, and those that do not come learn
    that it has left, by which ``sys.exit``, and its last error. An exception that ends a thread does not end the
    process.

    Args:
        core: a _C.ShardedModel; it is not kept alive, nor are its collectives.
        engine: a weak reference to the engine: before the process leaves at its end, ``end_watching()`` is called, and
            ``wait_for_checkpoint()``, collectively. Their exceptions are logged.
        group: the same object for cores of the same collectives, which meet the others once; None: a core alone.
    """
    global _hooks
    if not _present:
        atexit.register(_leave_together)
        _hooks = (_ExceptHook(), _ExitHook())
    _present[weakref.ref(core, _remove)] = (group or object(), engine)


def engines():
    """[engine]: those of this process that have not been destroyed, in the order in which they were made."""
    found = [engine() for _, engine in _present.values() if engine is not None]
    return [engine for engine in found if engine is not None and engine.core.alive]


def note_error(error):
    """Remembers an exception that goes through an engine. Where the script catches it and ends, it is what this
    process's peers are told."""
    global _last_error
    _last_error = f"{type(error).__name__}: {error}"


def unwatch(core):
    """Undoes ``watch``; nothing happens where that was done before."""
    _remove(weakref.ref(core))


def _remove(reference):
    global _hooks
    if _present.pop(reference, None) is not None and not _present:
        atexit.unregister(_leave_together)
        for hook in _hooks:
            hook.remove()
        _hooks = ()


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
        """Restores the hook from before. A hook that other code has put above stays, and calls it through this."""
        if sys.excepthook is self:
            sys.excepthook = self._previous


class _ExitHook:
    """Remembers where the program called ``sys.exit``, and calls that."""

    def __init__(self):
        self.failure = None  # str, of an exit with a failure
        self._previous, sys.exit = sys.exit, self

    def __call__(self, status=None, /):
        caller = sys._getframe(1)
        where = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        self.failure = None if status in (None, 0) else f"sys.exit({status!r}) at {where}"
        self._previous(status)

    def remove(self):
        """Restores the function from before, unless other code has put another one above."""
        if sys.exit is self:
            sys.exit = self._previous


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


def _last_words(core):
    steps = getattr(core, "global_steps", 0)
    words = f"its program ended after {steps} steps"
    failures = [f" by {hook.failure}" for hook in _hooks if isinstance(hook, _ExitHook) and hook.failure]
    words += "".join(failures)
    return (words if _last_error is None else f"{words}; its last error was {_last_error}")[:_REASON_MOST]


def _leave_together():
    """Never raises: whatever fails here failed before, and was told then."""
    # Where an exception ends the program, peers are not where this rank would wait for them.
    together = getattr(sys, "last_value", None) is None
    met = set()
    for reference in reversed(list(_present)):
        core = reference()
        if core is None or not core.alive:
            continue
        group, engine = _present[reference]
        try:
            if together:
                core.announce_departure(_last_words(core))
            if engine is not None and engine() is not None:
                engine().end_watching(wait=together)
                if together:
                    engine().wait_for_checkpoint()
        except Exception as error:
            logger.error("at exit: %s: %s", type(error).__name__, error)
        if not together:
            continue
        try:
            core.end_trace()
            if group not in met:
                met.add(group)
                core.depart()
        except Exception as error:
            logger.debug("at exit: %s: %s", type(error).__name__, error)
        except KeyboardInterrupt:
            return
