"""An engine's weights as whole state dicts, under DeepSpeed's names, and states that leave the device for a while."""

import importlib
from collections import OrderedDict
from collections.abc import Mapping

from . import _C
from .model.compiling import plain_name
from .rank_logging import logger

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


def _whole_weights():
    return importlib.import_module(".checkpoint.saving", __package__)  # not before the first use


class EngineWeights:
    """The part of ``Engine`` that reads and sets its weights as one dict."""

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """{name: tensor}: the model's state dict; at stage 3 whole copies on the host, on every rank (collective).
        ``destination`` and ``prefix``: a dict to fill and return, or None; a text before every name. ``keep_vars``:
        return tensors that autograd knows; without effect at stage 3. ``exclude_frozen_parameters``: leave out
        parameters that need no gradient."""
        return self._state_dict(True, destination, prefix, keep_vars, with_frozen=not exclude_frozen_parameters)

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False,
                               z3_params_to_fetch=None, allowed_missing_keys=None):  # fmt: skip
        """``load_state_dict`` with DeepSpeed's arguments. Returns (missing keys, unexpected keys); None with
        ``custom_load_fn``.

        Args:
            checkpoint: the state dict of whole tensors; or a dict whose "module" is the state dict.
            custom_load_fn: ``custom_load_fn(src=state dict, dst=model)`` sets values instead, while all of the model is
                whole; the device needs room for it.
            fetch_z3_params, z3_params_to_fetch: no effect; the engine gathers the parameters that it sets.
            allowed_missing_keys: names that may be missing though ``strict``.
        """
        inner = checkpoint.get("module")
        state_dict = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            return _whole_weights().set_whole_weights(self, state_dict, strict, allowed_missing_keys or ())
        from .zero import GatheredParameters

        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            custom_load_fn(src=state_dict, dst=self.module)
        return None

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """{name: tensor} under the model's own names, those of ``engine.module`` without what wrappers add.

        Collective at stage 3: the engine gathers parameters one at a time and copies them to the host of rank 0, which
        needs room for the whole model; other ranks get an empty dict. ``save_pretrained`` needs no such room. At stages
        0 to 2 every rank has the whole model, and this is ``engine.module.state_dict()``."""
        return self._state_dict(self.global_rank == 0, destination, prefix, keep_vars)

    def _state_dict(self, keep, destination, prefix, keep_vars, with_frozen=True):
        """``keep``: whether this rank gets whole copies at stage 3."""
        core, model = self.core, self.module
        core.require_weights("a state dict")
        core.require_own_memory()
        if self._config.stage < 3:
            found = model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
            items = [(plain_name(name), value) for name, value in found.items()]
            found.clear()  # and no new dict, which would lack torch's `_metadata`
            found.update(items)
            for name, parameter in () if with_frozen else model.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    found.pop(prefix + plain_name(name), None)
            return found
        found = _whole_weights().whole_state_dict(model, keep, with_frozen) or {}
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Gives the model the values of ``state_dict()``, of ``engine.module``'s, or of a wrapper that calls the model
        "module". Collective; rank 0's names and values count, other ranks may pass {}. The masters get the same values;
        the optimizer's states do not change. Returns (missing keys, unexpected keys). UsageError on every rank, with
        ``strict``, where names do not fit; where shapes do not fit; for ``assign``."""
        if assign:
            raise _C.UsageError("load_state_dict: assign=True would take the parameters from the engine; leave it out, "
                                "and values are copied")
        wrapped = bool(state_dict) and all(name.startswith("module.") for name in state_dict)
        if wrapped and not hasattr(self.module, "module"):
            state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return _whole_weights().set_whole_weights(self, state_dict, strict)

    def consolidated(self, exclude_frozen_parameters=False):
        """Whole weights on the host of rank 0, None on the others. Collective."""
        return _whole_weights().whole_state_dict(self.module, self.global_rank == 0, not exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict = consolidated  # DeepSpeed's names

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Writes the weights as one file of ``torch.save``, in the model's precision. Collective. Rank 0's host needs
        room for all of them; ``save_pretrained`` needs none. Under the default name the file replaces all weights in
        the folder, also safetensors, since transformers would load those instead. Returns False, and writes no file, at
        stage 3 where the configuration does not allow it (``stage3_gather_16bit_weights_on_model_save``); else True.
        IoError on every rank where rank 0 cannot write."""
        if self._config.stage >= 3 and not self._config.gather_16bit_weights_on_model_save:
            return False
        _whole_weights().save_whole(self, save_dir, save_filename, not exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model


class StateOffload:
    """The part of ``Engine`` that frees device memory for other uses between two phases of training."""

    _warned_of_weights = False

    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """Moves states of training from the device to host memory. Their memory on the device is free when this
        returns, whatever ``non_blocking`` is. ``reload_states()`` brings them back, bit for bit. Collective; between
        passes, also in a step that already has gradients. States that are offloaded already, to the host or to a drive,
        do not move.

        Until the reload ``step()``, checkpoints, and reading or setting states of parameters raise UsageError. So do
        ``backward()`` while gradient memory is away, and a forward or a read of a parameter while weights are away.
        Parameters have the shape [0] while the weights are away; the script must not use views of their memory
        (``p.data``) then. While the weights are on the device, the model may be evaluated, gathered and saved
        (``save_pretrained``).

        The weights stay, with one warning, where the ranks' transport cannot free their memory (gloo, drivers without
        virtual memory management). Weights in fp32 are their own masters: nothing moves as "hp_params" then. Where an
        optimizer of the script's updates the shards, "optim_states" moves the tensors of its ``state`` that are on the
        device; the parameters in its groups are empty while masters or weights are away, and have other memory
        afterwards.

        Args:
            include: the states, by DeepSpeed's names or ``OffloadStateTypeEnum``: "optim_states" (``exp_avg``,
                ``exp_avg_sq``), "hp_params" (masters, or their remainders), "lp_params" (the weights), "lp_grads"
                (reduced gradients) and "contiguous_grad_buffer" (gradients that are not reduced yet). None: all. The
                same on every rank.
            device: "cpu", or DeepSpeed's ``OffloadDeviceEnum.cpu``; "none" does nothing but warn.
            pin_memory: into pinned host memory, as far as the system lets this process pin some.

        Raises:
            UsageError: for other states and devices; within a backward pass or ``GatheredParameters``.
            OutOfMemoryError: on every rank, where a host has no room. The engine then counts all states but the weights
                as away: ``reload_states()`` brings back those that have moved.
        """
        where = _text(device)
        if where == "none":
            logger.warning("offload_states: device is 'none', so nothing is moved; write \"cpu\"")
            return
        if where != "cpu":
            raise _C.UsageError("offload_states moves states to the host: write device=\"cpu\"; to rest on a drive is "
                                f"for zero_optimization.offload_optimizer; found {where!r}")
        states = STATES if include is None else [_text(name) for name in include]
        for name in states:
            if name not in STATES:
                raise _C.UsageError(f"offload_states: include names states of {', '.join(STATES)}; found {name!r}")
        weights_follow = self.core.offload_states(list(states), pin_memory)
        if not weights_follow and not self._warned_of_weights and self.global_rank == 0:
            self._warned_of_weights = True
            logger.warning("offload_states: the weights (lp_params) stay on the device, since %s cannot give their "
                           "memory back; the other states are moved", self.collectives_name)

    def reload_states(self, non_blocking=False):
        """Brings back all states that ``offload_states()`` moved: they are back when this returns, whatever
        ``non_blocking`` is. Collective. Does nothing where none is away. OutOfMemoryError on every rank where a device
        has no room: states that are not back stay on the host; free memory, and call it again."""
        core = self.core
        core.reload_states()
        outside = getattr(core, "segment_states", None)  # where an optimizer of the user's updates the shards
        if outside is not None:
            outside.take_back(core)


def _text(name):
    """The text of a word, or of a member of an enumeration of words."""
    return str(getattr(name, "value", name))
