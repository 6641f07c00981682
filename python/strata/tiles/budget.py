"""The bound on the bytes of one parameter that may be gathered at once."""

import math

import torch

from ..model.owner import owner_of

_TILE = 256 << 20  # bytes, the default


class Budget:
    """The bytes of one parameter that may be gathered at once.

    Attributes:
        largest: int, bytes; a larger parameter is cut. None: none is.
        tile: int, bytes of a tile at most.
        read: int, the most bytes of a cut parameter that may be whole for a read outside its modules; None: any.
        asked: bool, whether the configuration sets the budget. If not, a parameter that cannot be cut is no error.
    """

    def __init__(self, config, half):
        self.read = half
        self.asked = config.tile_max is not None
        self.largest = config.tile_max if self.asked else half
        self.tile = config.tile_max if self.asked else min(_TILE, half or _TILE)
        if config.stage != 3:
            self.largest = None

    @classmethod
    def of_rank(cls, config, device, collectives, tree):
        """Collective on GPUs: half of the smallest free memory of a rank; the model's own memory counts as free, since
        the engine takes it over. A larger parameter would not fit beside its gradient."""
        if device.type != "cuda":
            return cls(config, None)
        free = torch.cuda.mem_get_info(device)[0]
        free += sum(p.numel() * p.element_size() for _, p in tree.parameters if p.device == device)
        # Ranks of other stages take part; a later check reports that stages differ.
        return cls(config, min(int(text) for text in collectives.all_gather_text(str(free // 2))))

    @classmethod
    def of_job(cls, config, device, device_memory):
        """The budget of a job that does not run."""
        return cls(config, device_memory // 2 if device == "cuda" and device_memory is not None else None)


def cut_parameters(tree, config, budget, born_flat=None):
    """Cuts the parameters of a model that exceed the budget: ``tree.cut`` holds them, None if there are none. After an
    error the model is unchanged.

    Args:
        tree: a ``ModelTree``.
        config: a _C.Config.
        budget: a ``Budget``.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded, or None; the tiles of
            these are added.
    """
    if budget.largest is None or not any(_nbytes(p, born_flat) > budget.largest for _, p in tree.parameters):
        return
    from .cutting import Cut  # it imports all rules, which most models do not need

    cut = Cut(tree, config, budget, born_flat)
    tree.cut = cut if cut.all else None


def _nbytes(parameter, born_flat):
    """int: an upper bound; the configuration's precision may need fewer bytes."""
    core, index = owner_of(parameter)
    shape = parameter.shape if core is None else core.full_shape(index)
    if born_flat and id(parameter) in born_flat:
        shape = born_flat[id(parameter)]
    return math.prod(shape) * max(parameter.dtype.itemsize, 4)
