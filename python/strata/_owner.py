"""Which engine owns a parameter: kept on the parameter itself, as two private attributes."""


def set_owner(parameter, core, index):
    """``core``: the _C.ShardedModel that owns it; ``index``: its index there."""
    parameter._strata_core = core
    parameter._strata_index = index


def owner_of(parameter):
    """(core, index), or (None, None) for what no living engine owns."""
    core = getattr(parameter, "_strata_core", None)
    if core is None or not core.alive:
        return None, None
    return core, parameter._strata_index


def clear_owner(parameter, core):
    """Forgets ``core``; leaves a later owner alone."""
    if parameter.__dict__.get("_strata_core") is core:
        del parameter._strata_core, parameter._strata_index
