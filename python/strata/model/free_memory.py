"""The free memory of a GPU, by which "auto" chooses."""

import torch


def free_bytes(device):
    """int: the memory that tensors may still take on a GPU; None for another device, where nothing is chosen by it."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def untaken_bytes(device):
    """int: the memory of a GPU that neither torch nor other programs hold."""
    return torch.cuda.mem_get_info(device)[0]


class MemoryChoice:
    """Chooses between a way that takes memory and one that spares it. Needs that are no smaller than one that was too
    large, or no larger than one that was not, have its answer: what the engine keeps in free memory later changes no
    step. ``share``: the part of free memory that the first way may take."""

    def __init__(self, share):
        self._share, self._small, self._large = share, 0, float("inf")

    def spares(self, need, device):
        """bool: whether ``need`` bytes of ``device`` are too many."""
        if self._small < need < self._large:
            free = free_bytes(device)
            if free is None or need <= self._share * free:
                self._small = need
            else:
                self._large = need
        return need >= self._large
