"""The engine's calls that save and load training checkpoints."""

import os

from .. import _C


class EngineCheckpoints:
    """The part of ``Engine`` for checkpoints, under DeepSpeed's names and signatures. It needs ``core``."""

    _saver = None  # made by the first save

    def checkpoint_saver(self):
        """The core's _C.TrainingSaver of this engine."""
        if self._saver is None:
            from .names import state_names  # not before the first save

            buffers = state_names(self.module)[1].values() if self.global_rank == 0 else ()
            self._saver = _C.TrainingSaver(self.core, sum(buffer.nbytes for buffer in buffers))
        return self._saver

    def wait_for_checkpoint(self):
        """Waits until the last checkpoint is on disk, where ``"checkpoint": {"async": true}`` writes it beside
        training. Collective. ``save_checkpoint``, ``load_checkpoint`` and ``destroy`` wait, too. IoError on every rank,
        where one of them could not write."""
        if self._saver is not None:
            self._saver.wait()

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """Saves a training checkpoint: weights, masters, the optimizer's states, the scheduler, the loss scale, counts
        of steps. Collective, between steps; every rank writes its own shards.

        The checkpoint is ``save_dir/tag``. It is complete or absent: it gets its name when all of it is on disk, and an
        earlier one of that tag stays until then. It loads at any number of ranks and any stage. With ``"checkpoint":
        {"async": true}`` this call returns when the shards are copied to the host. Threads write them beside the next
        steps; the next save, load, ``wait_for_checkpoint()`` or ``destroy()`` raises their error. Returns True.

        Args:
            save_dir: folder of the checkpoints, on a file system that all ranks see; made if need be.
            tag: name of this checkpoint; default "global_step<n>". The same on every rank.
            client_state: dict of the script's own values: numbers, texts, bytes, tensors, dicts, lists, tuples,
                numpy's numbers and arrays. Rank 0's dict is saved.
            save_latest: write the tag to ``save_dir/latest``, which ``load_checkpoint`` without a tag reads.
            exclude_frozen_parameters: leave out parameters that need no gradient.

        Raises:
            UsageError: for a tag that is no plain name, differs between ranks, or names a folder or file that is no
                checkpoint; for a value that cannot be saved; after an update, or loading, that failed half-way.
            IoError: on every rank, where one of them cannot write, the disk has no room for all of it, or another job
                saves into the folder.
        """
        from .training import save_checkpoint  # not before the first save

        return save_checkpoint(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        """Loads a checkpoint of ``save_checkpoint``, which any number of ranks may have saved at any stage. Collective,
        between steps; each rank reads and verifies the ranges of its own shards. Returns (path of the checkpoint,
        client state); (None, None), with a warning, where ``load_dir`` has no ``latest``.

        Args:
            load_dir: folder of the checkpoints.
            tag: name of the checkpoint, the same on every rank; default: the one that ``load_dir/latest`` names.
            load_module_strict: raise an error where parameters and buffers of model and checkpoint differ in names or
                shapes; False: skip and list those that differ.
            load_optimizer_states: load these, and the param groups' values, such as the learning rate.
            load_lr_scheduler_states: of the configuration's scheduler, or of the script's.
            load_module_only: load only the values of parameters and buffers.
            custom_load_fn: refused; change values after loading, within ``GatheredParameters``.

        Raises:
            FormatError: on every rank, for a checkpoint of another model, for a damaged one (the message names file,
                tensor and range), and for a link that leads out of its folder.
            IoError: there is no such checkpoint, or a file of it is missing.
            UsageError: ranks ask for different tags; the optimizer has another number of param groups.
        """
        from .training import load_checkpoint

        if custom_load_fn is not None:
            raise _C.UsageError("load_checkpoint: custom_load_fn would need the whole model on every host; load, and "
                                "change values within strata.zero.GatheredParameters(parameters, modifier_rank=0)")
        return load_checkpoint(self, os.fspath(load_dir), tag, load_module_strict, load_optimizer_states,
                               load_lr_scheduler_states, load_module_only)
