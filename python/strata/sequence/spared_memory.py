"""Spares memory in the training of long rows: a loss without logits, MLPs and norms in pieces, checkpoints' inputs on
the host. Imports of each no more than a model needs."""

import weakref
from contextlib import ExitStack

from ..model.interception import replaced

_MLPS = ("MLP", "Mlp", "FeedForward", "FFN")  # ends of the names of their classes


class SparedMemory:
    """Has the models among ``modules`` spare memory as ``config`` says. Made before an engine intercepts the modules;
    ``install`` comes afterwards, and ``undo()`` when the engine has let go of them."""

    _latest = lambda: None  # noqa: E731 - a weak reference to that of the latest engine

    def __init__(self, modules, config):
        self._config, self._inputs, self._heads = config, None, None
        self._checkpointed = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self._enabling = [module for module in modules if hasattr(module, "gradient_checkpointing_enable")]
        mlps = [module for module in modules if type(module).__name__.endswith(_MLPS)]
        self._before = ExitStack()
        if mlps and config.mlp_piece != 0:
            from .module_pieces import MlpPieces, NormPieces

            self._before.callback(MlpPieces(mlps, config.mlp_piece).undo)
            self._before.callback(NormPieces(modules, config.mlp_piece).undo)
        if config.loss != "plain":
            from ..tiles.vocabulary_loss import WholeHeads

            self._heads = WholeHeads(modules, config.loss)
            self._before.callback(self._heads.undo)
        self.undo = self._before.close

    @staticmethod
    def latest():
        """The object of the latest engine; None: there is none."""
        return SparedMemory._latest()

    def install(self, core, device):
        """``core``: the engine's _C.ShardedModel. ``device``: torch.device of the model. Returns a function that undoes
        this."""
        self._core, self._device, SparedMemory._latest = core, device, weakref.ref(self)
        undo = ExitStack()
        if self._heads is not None:
            undo.callback(self._heads.install(core))
        for module in self._enabling:
            undo.callback(replaced(module, "gradient_checkpointing_enable", _Enabling(module, self)))
        self.renew()
        undo.callback(self._end)
        return undo.close

    def _end(self):
        if self._inputs is not None:
            self._inputs.release(self._checkpointed)
        if SparedMemory._latest() is self:
            SparedMemory._latest = lambda: None

    def renew(self):
        """Has every checkpoint of transformers that was asked for so far keep its inputs here."""
        for module in self._checkpointed:
            if "_gradient_checkpointing_func" in vars(module):
                self.inputs.take(module)

    @property
    def inputs(self):
        """The ``CheckpointInputs`` of the model."""
        if self._inputs is None:
            from .checkpoint_inputs import CheckpointInputs

            self._inputs = CheckpointInputs(self._core, self._device, self._config.activations, self._checkpointed)
        return self._inputs


class _Enabling:
    """Stands for ``gradient_checkpointing_enable`` of one module."""

    def __init__(self, module, spared):
        self.__wrapped__, self._spared = module.gradient_checkpointing_enable, spared

    def __call__(self, *args, **kwargs):
        self.__wrapped__(*args, **kwargs)
        self._spared.renew()

    def __reduce__(self):
        return self.__wrapped__.__reduce__()
