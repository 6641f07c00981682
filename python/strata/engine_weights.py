"""The engine's weights as whole state dicts, under DeepSpeed's names."""

from collections import OrderedDict
from collections.abc import Mapping

from . import _C


def _whole_weights():
    from .checkpoint import saving  # not before the first use

    return saving


class EngineWeights:
    """The part of ``Engine`` that reads and sets its weights as one dict. It needs ``_config``, ``core``, ``module``
    and ``global_rank``."""

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """{name: tensor}: the model's state dict; at stage 3 whole copies on the host, on every rank (collective).

        Args:
            destination: a dict to fill and return; None: a new one.
            prefix: a text before every name.
            keep_vars: return tensors that autograd knows; without effect at stage 3.
            exclude_frozen_parameters: leave out parameters that need no gradient.
        """
        self.core.require_weights("a state dict")
        self.core.require_own_memory()
        destination = OrderedDict() if destination is None else destination
        if self._config.stage >= 3:
            found = _whole_weights().whole_state_dict(self.module, with_frozen=not exclude_frozen_parameters)
            destination.update((prefix + name, value) for name, value in found.items())
            return destination
        found = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if exclude_frozen_parameters and not parameter.requires_grad:
                found.pop(prefix + name, None)
        return found

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False,
                               z3_params_to_fetch=None, allowed_missing_keys=None):  # fmt: skip
        """Gives the model the values of a state dict of whole tensors. Collective; rank 0's values count. The masters
        get the same values; the optimizer's states do not change.

        Args:
            checkpoint: the state dict; or a dict whose "module" is the state dict.
            custom_load_fn: ``custom_load_fn(src=state dict, dst=model)`` sets values instead, while all of the model
                is whole; the device needs room for it.
            fetch_z3_params, z3_params_to_fetch: accepted for DeepSpeed's sake; the engine gathers the parameters that
                it sets.
            allowed_missing_keys: names that may be missing though ``strict``.

        Returns:
            (missing keys, unexpected keys); None with ``custom_load_fn``.

        Raises:
            UsageError: with ``strict``, where names do not fit; where shapes do not fit.
        """
        inner = checkpoint.get("module")
        state_dict = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            return _whole_weights().set_whole_weights(self, state_dict, strict, allowed_missing_keys or ())
        from .gathered_parameters import GatheredParameters

        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            custom_load_fn(src=state_dict, dst=self.module)
        return None

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """{name: tensor} under the model's own names, those of ``engine.module``.

        Collective at stage 3: the engine gathers parameters one at a time and copies them to the host of rank 0, which
        needs room for the whole model; other ranks get an empty dict. ``save_pretrained`` needs no such room. At stages
        0 to 2 every rank has the whole model, and this is ``engine.module.state_dict()``.
        """
        self.core.require_weights("a state dict")
        self.core.require_own_memory()
        if self._config.stage < 3:
            return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        found = _whole_weights().whole_state_dict(self.module, self.global_rank == 0) or {}
        destination = OrderedDict() if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Gives the model the values of ``state_dict()``, of ``engine.module``'s, or of a wrapper that calls the model
        "module". Collective; rank 0's names and values count, other ranks may pass {}. The masters get the same values;
        the optimizer's states do not change.

        Returns:
            (missing keys, unexpected keys).

        Raises:
            UsageError: on every rank, with ``strict``, where names do not fit; where shapes do not fit; for ``assign``.
        """
        if assign:
            raise _C.UsageError("load_state_dict: assign=True would take the parameters from the engine; leave it out, "
                                "and values are copied")
        wrapped = bool(state_dict) and all(name.startswith("module.") for name in state_dict)
        if wrapped and not hasattr(self.module, "module"):
            state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return _whole_weights().set_whole_weights(self, state_dict, strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """Whole weights on the host of rank 0, None on the others. Collective."""
        return _whole_weights().whole_state_dict(self.module, self.global_rank == 0, not exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """Writes the weights as one file of ``torch.save``, in the model's precision. Collective. Rank 0's host needs
        room for all of them; ``save_pretrained`` needs none. Under the default name the file replaces all weights in
        the folder, also safetensors, since transformers would load those instead.

        Returns:
            bool: False at stage 3 where the configuration does not allow it
            (``stage3_gather_16bit_weights_on_model_save``); it has written no file then.

        Raises:
            IoError: on every rank, where rank 0 cannot write.
        """
        if self._config.stage >= 3 and not self._config.gather_16bit_weights_on_model_save:
            return False
        _whole_weights().save_whole(self, save_dir, save_filename, not exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model
