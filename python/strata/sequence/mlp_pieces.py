"""MLPs of decoders that compute pieces of long rows, within the scope that gathers their weights."""

import copyreg
import functools

import torch

from ..model.free_memory import MemoryChoice
from ..model.tiles import tiles_of
from .pieces import in_pieces

_TOKENS = 8192  # of a piece: as many as keep sums of weights' gradients a few percent of the products
_LIBRARIES = ("transformers.", "transformers_modules.", "liger_kernel.")  # whose MLPs take each token by itself
_OF_EACH_NUMBER = ("torch.nn.modules.activation", "transformers.activations", "torch.nn.modules.linear",
                   "torch.nn.modules.dropout")  # modules of torch.nn.Identity and others
_TENSORS = 8  # of [tokens, inner width] in forward and backward


class MlpPieces:
    """Has MLPs compute at most ``tokens`` tokens at a time in training; None: pieces where all would take more than a
    quarter of a GPU's free memory, but not in compiled code, nor of classes that are not transformers'. ``modules``
    have names of MLPs: those are some that have linear layers and activations alone, without dropout and tiles.
    ``undo()`` ends this."""

    def __init__(self, modules, tokens):
        self.tokens, self._choice = tokens, MemoryChoice(share=1 / 4)
        widths = {module: _inner_width(module) for module in modules if "forward" not in vars(module)
                  and (tokens is not None or type(module).__module__.startswith(_LIBRARIES))}  # fmt: skip
        self._widths = {module: width for module, width in widths.items() if width is not None}
        for module in self._widths:
            vars(module)["_strata_pieces"] = self
            module.__class__ = _class_with_pieces(type(module))

    def undo(self):
        for module in self._widths:
            module.__class__ = type(module).__base__
            del vars(module)["_strata_pieces"]
        self._widths = {}

    def needed(self, module, x):
        """bool: whether ``module`` shall compute pieces of ``x``, [..., tokens, width]."""
        if self.tokens is not None or not torch.is_grad_enabled():
            return torch.is_grad_enabled()
        need = _TENSORS * self._widths[module] * x.element_size() * (x.numel() // x.shape[-1])
        return self._choice.spares(need, x.device)


@functools.cache
def _class_with_pieces(kind):
    """A class for modules of ``kind``, in its place. All layers have one class, so that they share a compiled graph.
    Copies and pickles are of ``kind``."""

    def forward(self, *args, **kwargs):
        pieces = self._strata_pieces
        if kwargs or len(args) != 1 or (pieces.tokens is None and torch.compiler.is_compiling()):
            return kind.forward(self, *args, **kwargs)
        if not pieces.needed(self, *args):
            return kind.forward(self, *args)
        whole = functools.partial(kind.forward, self)
        return in_pieces(whole, *args, pieces.tokens or _TOKENS, self.parameters())

    def reduce(self, protocol):
        state = {name: value for name, value in vars(self).items() if name != "_strata_pieces"}
        return copyreg._reconstructor, (kind, object, None), state

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduce, **names})


def _inner_width(module):
    """The most outputs of a linear layer within an MLP; None for another module."""
    children = list(module.children())
    linear = [child for child in children if hasattr(child, "in_features") and hasattr(child, "out_features")]
    if len(linear) < 2 or linear[0].in_features != linear[-1].out_features:
        return None
    others = [child for child in children if child not in linear]
    if module._parameters or not all(type(child).__module__ in _OF_EACH_NUMBER for child in others):
        return None
    if any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in module.modules()):
        return None
    whole = all(tiles_of(parameter) is None for parameter in module.parameters())
    return max(child.out_features for child in linear) if whole else None
