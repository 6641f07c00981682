"""Moves the ownership of parameters: from the user to an engine, between engines, and back."""

import math

from .. import _C
from .owner import clear_owner, owner_of, set_owner
from .parameter import mark_managed, unmark_managed
from .tiles import tiles_of

_GIVEN_UP = "_strata_given_up"


def take_ownership(core, parameters, stage, weakly=True):
    """Marks every parameter of ``core``; at stage 3 they look as DeepSpeed's do from now on.

    Args:
        core: a _C.ShardedModel.
        parameters: the result of ``describe_parameters`` from which it was made.
        stage: of ZeRO.
        weakly: as ``set_owner`` takes it.
    """
    for index, (_, parameter, shape, *_rest) in enumerate(parameters):
        set_owner(parameter, core, index, weakly)
        parameter.__dict__.pop(_GIVEN_UP, None)
        if stage == 3:
            mark_managed(parameter, shape)
        else:
            unmark_managed(parameter)


def release_ownership(parameters):
    """Undoes ``take_ownership``, once the core is destroyed. Parameters of a later engine stay that engine's."""
    for _, parameter, shape, *_rest in parameters:
        if owner_of(parameter)[0] is not None:
            continue
        clear_owner(parameter)
        unmark_managed(parameter)
        if parameter.numel() == 0 and math.prod(shape) > 0:
            discard_values([parameter])


def discard_values(parameters):
    """Marks these parameters as empty because their engine has ended."""
    for parameter in parameters:
        setattr(parameter, _GIVEN_UP, True)


def require_values(named_parameters):
    """Raises UsageError where one of [(name, parameter)] is empty because its engine has ended, or is in tiles of a
    living engine."""
    for name, parameter in named_parameters:
        tiles = tiles_of(parameter)
        if tiles is not None and tiles[0].core is not None:
            raise _C.UsageError(
                f"'{name}' is used in tiles by an engine that lives, from which no other can take it over; end that "
                "one first, with engine.destroy(keep_values=True) to go on with its values"
            )
    lost = [name for name, parameter in named_parameters if _is_lost(parameter)]
    if lost:
        raise _C.UsageError(
            f"{len(lost)} parameters of this model are empty: their engine was destroyed, or dropped, and the shards "
            "went with it. End it with engine.destroy(keep_values=True), or build or load the model again. First: "
            f"'{lost[0]}'"
        )


def _is_lost(parameter):
    if parameter.numel() > 0 or owner_of(parameter)[0] is not None:
        return False
    return _GIVEN_UP in parameter.__dict__ or parameter.__dict__.get("ds_numel", 0) > 0
