"""``deepspeed.OnDevice``: builds a model on a device and in a dtype."""

import torch


class OnDevice:
    """Context in which torch makes tensors on a device, floating ones in a dtype.

    Args:
        dtype: torch.dtype.
        device: a device, or "meta": without memory.
        enabled: False makes the context do nothing.
    """

    def __init__(self, dtype, device="meta", enabled=True):
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self):
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(self, *error):
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)
        return False
