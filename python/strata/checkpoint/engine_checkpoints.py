"""The engine's calls that save training and go on with it."""

import os

from .. import _C


class EngineCheckpoints:
    """What ``Engine`` does with checkpoints, under DeepSpeed's names and signatures. It has ``core``."""

    _saver = None  # made when somebody saves

    def checkpoint_saver(self):
        """The core's _C.TrainingSaver of this engine."""
        if self._saver is None:
            beside = _buffer_bytes(self.module) if self.global_rank == 0 else 0
            self._saver = _C.TrainingSaver(self.core, beside)
        return self._saver

    def wait_for_checkpoint(self):
        """Returns when the last checkpoint stands on disk that ``"checkpoint": {"async": true}`` lets be written beside
        training. Collective. ``save_checkpoint``, ``load_checkpoint`` and ``destroy`` wait, too.

        Raises:
            IoError: on every rank, where one of them could not write.
        """
        if self._saver is not None:
            self._saver.wait()

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """Saves everything that training needs to go on: weights, masters, the optimizer's states, the scheduler, loss
        scale, counts of steps. Collective, between steps; every rank writes its own shards.

        The checkpoint is ``save_dir/tag``, whole or not there: it gets its name when all of it is on disk, and what was
        in the folder stays until then. It loads at any number of ranks and any stage. With ``"checkpoint": {"async":
        true}`` this returns when the shards are copied to the host; they are written beside the next steps, and what
        goes wrong there is raised by the next save, load, ``wait_for_checkpoint()`` or ``destroy()``.

        Args:
            save_dir: folder of the checkpoints, seen by all ranks; made if need be.
            tag: name of this one; default "global_step<n>". The same on every rank.
            client_state: dict of the script's own values: numbers, texts, bytes, tensors, dicts, lists, tuples,
                numpy's numbers and arrays. Rank 0's is kept.
            save_latest: let ``save_dir/latest`` name it, which ``load_checkpoint`` without a tag follows.
            exclude_frozen_parameters: leave parameters out that need no gradient.

        Returns:
            True.

        Raises:
            UsageError: for a tag that is no plain name, differs between ranks, or is the name of something that is no
                checkpoint; for a value that cannot be kept; after an update, or loading, that failed half-way.
            IoError: on every rank, where one of them cannot write, the disk has no room for all of it, or another job
                saves into the folder.
        """
        from .training import save_checkpoint  # not before somebody saves

        return save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True,
        load_module_only=False, custom_load_fn=None,
    ):  # fmt: skip
        """Goes on from a checkpoint of ``save_checkpoint``, whatever number of ranks and stage saved it. Collective,
        between steps; each rank reads what its own shards need, and verifies it.

        Args:
            load_dir: folder of the checkpoints.
            tag: which one, the same on every rank; default the one that ``load_dir/latest`` names.
            load_module_strict: an error where model and checkpoint have not the same parameters and buffers, in their
                shapes; False: what they have not in common is skipped and listed.
            load_optimizer_states: and the param groups' values, such as a live learning rate.
            load_lr_scheduler_states: of the configuration's scheduler, or of the script's.
            load_module_only: nothing but values of parameters and buffers.
            custom_load_fn: refused; change values after loading, within ``GatheredParameters``.

        Returns:
            (path of the checkpoint, client state). (None, None), with a warning, where ``load_dir`` has no ``latest``.

        Raises:
            FormatError: on every rank, for a checkpoint of another model, for one that is damaged (file, tensor and
                place are named), and for a link that leads out of its folder.
            IoError: there is no such checkpoint, or a file of it is missing.
            UsageError: ranks ask for different tags; the optimizer has another number of param groups.
        """
        from .training import load_checkpoint

        if custom_load_fn is not None:
            raise _C.UsageError("load_checkpoint: custom_load_fn would need the whole model on every host; load, and "
                                "change values within strata.zero.GatheredParameters(parameters, modifier_rank=0)")
        return load_checkpoint(self, os.fspath(load_dir), tag, load_module_strict, load_optimizer_states,
                               load_lr_scheduler_states, load_module_only)


def _buffer_bytes(model):
    """Of the buffers that a checkpoint has."""
    return sum(
        buffer.nbytes for module in model.modules() for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )  # fmt: skip
