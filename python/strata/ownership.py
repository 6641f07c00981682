"""Parameters change hands: from the user to an engine, from one engine to another."""

from ._owner import clear_owner, set_owner
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
