"""Spares memory in the training of long rows: a loss without logits, MLPs in pieces, checkpoints' inputs on the
host."""

from contextlib import ExitStack

from .checkpoint_inputs import CheckpointInputs
from .mlp_pieces import MlpPieces


class SparedMemory:
    """Has the models among ``modules``, of which the first is the engine's, spare memory as ``config`` says. Made
    before an engine intercepts the modules; ``install`` comes afterwards, and ``undo()`` when the engine has let go of
    them."""

    def __init__(self, modules, config):
        self._modules, self._config, self._heads = modules, config, None
        self._pieces = MlpPieces(modules, config.mlp_piece)
        if config.loss != "plain":
            from ..tiles.vocabulary_loss import WholeHeads  # not for other models

            self._heads = WholeHeads(modules, config.loss)

    def install(self, core, device):
        """``core``: the engine's _C.ShardedModel. ``device``: torch.device of the model. Returns a function that undoes
        this."""
        undo = ExitStack()
        if self._heads is not None:
            undo.callback(self._heads.install(core))
        undo.callback(CheckpointInputs(core, device, self._config.activations).install(self._modules[0]))
        return undo.close

    def undo(self):
        if self._heads is not None:
            self._heads.undo()
        self._pieces.undo()
