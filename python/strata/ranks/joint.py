"""One outcome for all ranks of what each of them does for itself."""

from contextlib import contextmanager

from .. import _C


@contextmanager
def together(collectives, what):
    """Collective. An exception inside, on any rank, becomes an error on every rank that names the first
    rank that failed, so that none waits for one that has left. Inside must be no collective.

    Args:
        collectives: a _C.Collectives.
        what: names the work in messages: "opening the checkpoint".

    Raises:
        strata.Error: of the class that the first failed rank had; a rank that failed otherwise (a
            TypeError) raises its own exception.
    """
    kind = message = ""
    own = None
    try:
        yield
    except _C.CommError:
        raise
    except Exception as error:
        own = error
        kind, message = type(error).__name__, str(error) or type(error).__name__
        if not isinstance(error, _C.Error):
            message = f"{kind}: {message}"
    try:
        _C.agree(collectives, what, kind, message)
    except _C.Error as agreed:
        if own is not None and not isinstance(own, _C.Error):
            raise own from agreed
        raise
