"""MLPs of decoders that compute pieces of long rows, within the scope that gathers their weights."""

from contextlib import ExitStack

import torch

from ..model.free_memory import MemoryChoice
from ..model.interception import replaced
from ..model.tiles import tiles_of
from .pieces import in_pieces

_ENDS = ("MLP", "Mlp", "FeedForward", "FFN")  # of the names of their classes
_TOKENS = 8192  # of a piece: as many as keep sums of weights' gradients a few percent of the products
_TENSORS = 8  # of [tokens, inner width] in forward and backward


class MlpPieces:
    """Has the MLPs among ``modules`` compute at most ``tokens`` tokens at a time in training; 0: all; None: pieces
    where all would take more than a quarter of a GPU's free memory, but not in compiled code. An MLP is a module of linear
    layers and activations alone, without dropout and tiles, whose class has the name of one. Made before an engine
    intercepts the modules; ``undo()`` is for after it has let go of them."""

    def __init__(self, modules, tokens):
        undo, choice = ExitStack(), MemoryChoice(share=1 / 4)
        for module in modules if tokens != 0 else ():
            if (width := _inner_width(module)) is not None:
                undo.callback(replaced(module, "forward", _InPieces(module, width, tokens, choice)))
        self.undo = undo.close


class _InPieces:
    """Stands below the forward of one MLP."""

    def __init__(self, module, width, tokens, choice):
        self.__wrapped__, self._module = module.forward, module
        self._width, self._tokens, self._choice = width, tokens, choice

    def __call__(self, *args, **kwargs):
        if kwargs or len(args) != 1 or not self._takes_pieces(*args):
            return self.__wrapped__(*args, **kwargs)
        return in_pieces(self.__wrapped__, *args, self._tokens or _TOKENS, self._module.parameters())

    def _takes_pieces(self, x):
        if self._tokens is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._tokens is not None and torch.is_grad_enabled()
        need = _TENSORS * self._width * x.element_size() * (x.numel() // x.shape[-1])
        return self._choice.spares(need, x.device)

    def __reduce__(self):
        return self.__wrapped__.__reduce__()


def _inner_width(module):
    """The most outputs of a linear layer within an MLP; None for another module."""
    children = list(module.children())
    linear = [child for child in children if hasattr(child, "in_features") and hasattr(child, "out_features")]
    if not type(module).__name__.endswith(_ENDS) or len(linear) < 2 or linear[0].in_features != linear[-1].out_features:
        return None
    others = [child for child in children if child not in linear]
    if any(True for child in others for _ in child.parameters()) or any(
            isinstance(part, torch.nn.Dropout) and part.p > 0 for part in module.modules()):
        return None
    whole = all(tiles_of(parameter) is None for parameter in module.parameters())
    return max(child.out_features for child in linear) if whole else None
