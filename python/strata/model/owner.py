"""The engine that owns a parameter: two private attributes of the parameter hold it."""

import weakref


def set_owner(parameter, core, index, weakly=True):
    """Makes ``core`` the owner.

    Args:
        core: a _C.ShardedModel.
        index: the parameter's index there.
        weakly: the parameter does not keep ``core``, which keeps the parameter where Python's collector cannot see it.
    """
    parameter._strata_core = weakref.ref(core) if weakly else core
    parameter._strata_index = index


def owner_of(parameter):
    """(core, index), or (None, None) for a parameter that no living engine owns."""
    core = getattr(parameter, "_strata_core", None)
    if isinstance(core, weakref.ref):
        core = core()
    if core is None or not core.alive:
        return None, None
    return core, parameter._strata_index


def clear_owner(parameter):
    """Forgets the owner."""
    parameter.__dict__.pop("_strata_core", None)
    parameter.__dict__.pop("_strata_index", None)
