"""Which engine owns a parameter, and how parameters change hands: from the user to an engine, and between engines.

The owner is kept on the parameter itself, as two private attributes."""

from .parameter import mark_sharded, unmark_sharded


def take_ownership(core, parameters):
    """Marks every parameter of ``core``; sharded ones look as DeepSpeed's do from now on.

    Args:
        core: a _C.ShardedModel.
        parameters: what it was made of (``describe_parameters``).
    """
    for index, (_, parameter, shape, *_rest) in enumerate(parameters):
        set_owner(parameter, core, index)
        if core.is_sharded(index):
            mark_sharded(parameter, index, shape)
        else:
            unmark_sharded(parameter)


def give_up_ownership(core, parameters):
    """Undoes ``take_ownership``, once ``core`` is destroyed."""
    for _, parameter, *_rest in parameters:
        clear_owner(parameter, core)
        unmark_sharded(parameter)


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
