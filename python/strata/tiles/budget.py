"""How much of one parameter may be gathered at once."""

import math

import torch

from ..model.owner import owner_of

_TILE = 256 << 20  # bytes, the default


class Budget:
    """The bytes of one parameter that may be gathered at once.

    Attributes:
        largest: int, bytes; a larger parameter is cut. None: none is.
        tile: int, bytes of a tile at most.
        read: int, bytes of a parameter that is cut which may be whole for a reader outside its modules; None: any.
        asked: bool, whether the configuration asks for it. If it does not, a parameter that cannot be cut is no error.
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
        """Collective on GPUs: half of the least that a rank has free there, beside the model, which gives its memory
        up. A parameter that takes more fits beside its gradient in no case."""
        if device.type != "cuda":
            return cls(config, None)
        free = torch.cuda.mem_get_info(device)[0]
        free += sum(p.numel() * p.element_size() for _, p in tree.parameters if p.device == device)
        # Ranks of other stages take part: that they differ is found, and said, later.
        return cls(config, min(int(text) for text in collectives.all_gather_text(str(free // 2))))

    @classmethod
    def of_job(cls, config, device, device_memory):
        """The budget of a job that does not run."""
        return cls(config, device_memory // 2 if device == "cuda" and device_memory is not None else None)


def cut_parameters(tree, config, budget, born_flat=None):
    """Cuts the parameters of a model that exceed the budget: ``tree.cut`` holds them, None if there are none. After an
    error the model is as it was.

    Args:
        tree: a ``ModelTree``.
        config: a _C.Config.
        budget: a ``Budget``.
        born_flat: {id(parameter): full shape} of parameters that are empty until they are loaded, or None; the tiles of
            these are added.
    """
    if budget.largest is None or not any(_nbytes(p, born_flat) > budget.largest for _, p in tree.parameters):
        return
    from .cutting import Cut  # with all rules, which most models do without

    cut = Cut(tree, config, budget, born_flat)
    tree.cut = cut if cut.all else None


def _nbytes(parameter, born_flat):
    """At most: the configuration may have it in fewer."""
    core, index = owner_of(parameter)
    shape = parameter.shape if core is None else core.full_shape(index)
    if born_flat and id(parameter) in born_flat:
        shape = born_flat[id(parameter)]
    return math.prod(shape) * max(parameter.dtype.itemsize, 4)
