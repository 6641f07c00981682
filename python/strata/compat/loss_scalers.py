"""Classes that DeepSpeed's checkpoints need to be unpickled: data without behaviour."""

from dataclasses import dataclass


class LossScalerBase:
    """The state of a loss scaler, as attributes.

    Args:
        cur_scale: float, the factor of the loss.
    """

    def __init__(self, cur_scale=1.0):
        self.cur_scale = cur_scale

    @property
    def loss_scale(self):
        """float: ``cur_scale``."""
        return self.cur_scale


class LossScaler(LossScalerBase):
    """A constant loss scale."""


class DynamicLossScaler(LossScalerBase):
    """A loss scale that adapts; the engine's own follows ``fp16`` of the configuration."""


@dataclass
class fragment_address:  # noqa: N801 - the name that is in files
    """A range of a flat partition: its number of elements and its offset."""

    numel: int
    start: int
