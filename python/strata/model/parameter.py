"""How a sharded parameter looks to frameworks that know DeepSpeed's: the ``ds_*`` attributes.

The user's Parameter objects stay the same objects; while their model is sharded (stage 3) their class is
``ShardedParameter``. A copy or pickle of one is a plain ``torch.nn.Parameter``.
"""

import enum

import torch


class ParameterStatus(enum.Enum):
    """Whether a parameter is whole on this rank now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedParameter(torch.nn.Parameter):
    """A parameter that is empty (``numel() == 0``, shape [0]) unless it is gathered.

    Attributes:
        ds_id: int, its index in the model; equal on all ranks.
        ds_shape: torch.Size, the full shape, gathered or not.
        ds_numel: int, elements of the full shape.
        ds_status: ``ParameterStatus``, live.
    """

    @property
    def ds_status(self):
        gathered = self.ds_numel == 0 or self.numel() != 0
        return ParameterStatus.AVAILABLE if gathered else ParameterStatus.NOT_AVAILABLE

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.data.clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return torch.nn.Parameter(self.data.clone(), self.requires_grad).__reduce_ex__(protocol)


def mark_sharded(parameter, index, shape):
    """Makes ``parameter`` (shape [0] or full) a ShardedParameter in place; ``shape`` is the full one."""
    parameter.ds_id = index
    parameter.ds_shape = torch.Size(shape)
    parameter.ds_numel = parameter.ds_shape.numel()
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = ShardedParameter


def unmark_sharded(parameter):
    """Takes back what ``mark_sharded`` did."""
    for name in ("ds_id", "ds_shape", "ds_numel"):
        parameter.__dict__.pop(name, None)
    if type(parameter) is ShardedParameter:
        parameter.__class__ = torch.nn.Parameter
