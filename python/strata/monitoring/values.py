"""Numbers that a device computes, for readers that do not wait for the device."""

import torch


class LateValue:
    """The present value of a tensor; on a GPU the device copies it in the order of its current stream.

    Args:
        tensor: of one element; of a larger one the mean.
    """

    def __init__(self, tensor):
        value = tensor.detach()
        if value.numel() != 1:
            value = value.float().mean()
        if value.device.type != "cuda":
            self._event, self._value = None, float(value)
            return
        self._value = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._value.copy_(value.reshape(()), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(value.device))

    def ready(self):
        """bool: whether ``get()`` would not wait."""
        return self._event is None or self._event.query()

    def get(self):
        """float."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
