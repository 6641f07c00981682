"""MLPs and norms of decoders that compute pieces of long rows, within the scope that gathers their weights."""

import copyreg
import functools

import torch

from ..model.free_memory import MemoryChoice
from ..model.parameter import parameter_at
from ..model.tiles import tiles_of
from .pieces import in_pieces

_TOKENS = 8192  # of a piece: as many as keep sums of weights' gradients a few percent of the products
_NUMBERS = 1 << 25  # of a norm's piece: 128 MiB in fp32
_LIBRARIES = ("transformers.", "transformers_modules.", "liger_kernel.")  # whose MLPs take each token by itself
_OF_EACH_NUMBER = ("torch.nn.modules.activation", "transformers.activations", "torch.nn.modules.linear",
                   "torch.nn.modules.dropout")  # modules of torch.nn.Identity and others
_TENSORS = 8  # of [tokens, inner width] in forward and backward


class ModulePieces:
    """Has modules compute pieces of their input in training. ``tokens``: of a piece; None: pieces where all would take
    more than a ``share`` of a GPU's free memory, but not in compiled code. ``undo()`` ends this.

    Subclasses have ``need(module, x)``, the bytes that pieces of ``x`` would spare, and ``compute(function, module,
    x)``, which is ``function(x)`` in pieces."""

    def __init__(self, modules, tokens, share):
        self._tokens, self._choice, self._modules = tokens, MemoryChoice(share), list(modules)
        for module in self._modules:
            vars(module)["_strata_pieces"] = self
            module.__class__ = _class_with_pieces(type(module))

    def undo(self):
        for module in self._modules:
            module.__class__ = type(module).__base__
            del vars(module)["_strata_pieces"]
        self._modules = []

    def takes(self, module, x):
        """bool: whether ``module`` shall compute pieces of ``x``."""
        if not torch.is_grad_enabled():
            return False
        return self._tokens is not None or self._choice.spares(self.need(module, x), x.device)


class MlpPieces(ModulePieces):
    """``modules`` have names of MLPs: those are some that have linear layers and activations alone, without dropout and
    tiles, and, where ``tokens`` is None, whose class is of transformers. ``in_pieces`` says what a piece costs."""

    def __init__(self, modules, tokens):
        widths = {module: _inner_width(module) for module in modules if "forward" not in vars(module)
                  and (tokens is not None or type(module).__module__.startswith(_LIBRARIES))}  # fmt: skip
        self._widths = {module: width for module, width in widths.items() if width is not None}
        super().__init__(self._widths, tokens, share=1 / 4)

    def takes(self, module, x):
        compiled = self._tokens is None and torch.compiler.is_compiling()
        return not compiled and super().takes(module, x)

    def need(self, module, x):
        return _TENSORS * self._widths[module] * x.element_size() * (x.numel() // x.shape[-1])

    def compute(self, function, module, x):
        return in_pieces(function, x, self._tokens or _TOKENS, module.parameters())


class NormPieces(ModulePieces):
    """RMS norms of transformers among ``modules``. Each keeps its input until backward, and not what it makes of it in
    fp32 and on the way to its weight, four times as many bytes in 16 bits; for that it runs again. Compiled code,
    which keeps no more by itself, has no pieces."""

    def __init__(self, modules, tokens):
        norms = (module for module in modules if type(module).__name__.endswith("RMSNorm")
                 and type(module).__module__.startswith(_LIBRARIES[:2]) and "forward" not in vars(module)
                 and list(module._parameters) == ["weight"] and not module._modules)  # fmt: skip
        whole = (norm for norm in norms if tiles_of(parameter_at(norm, "weight")) is None)
        super().__init__(whole, tokens, share=1 / 32)

    def takes(self, module, x):
        return not torch.compiler.is_compiling() and x.is_contiguous() and super().takes(module, x)

    def need(self, module, x):
        return x.numel() * (4 + x.element_size())

    def compute(self, function, module, x):
        rows = _NUMBERS // x.shape[-1]
        if self._tokens is not None:  # heads may have a dimension of their own behind the tokens
            rows = self._tokens * x.shape[2:-1].numel()
        return in_pieces(function, x.flatten(0, -2), max(1, rows), module.parameters()).view(x.shape)


@functools.cache
def _class_with_pieces(kind):
    """A class for modules of ``kind``, in its place. All layers have one class, so that they share a compiled graph.
    Copies and pickles are of ``kind``."""

    def forward(self, *args, **kwargs):
        pieces = self._strata_pieces
        if kwargs or len(args) != 1 or not pieces.takes(self, *args):
            return kind.forward(self, *args, **kwargs)
        return pieces.compute(functools.partial(kind.forward, self), self, *args)

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
