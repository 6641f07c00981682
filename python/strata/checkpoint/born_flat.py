"""Builds transformers models whose parameters have no memory and whose buffers are real."""

from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import _C
from .names import state_names
from .supported_transformers import private


def build_model(model_class, config, dtype, model_arguments):
    """A transformers model with meta parameters of the right shape and real buffers, in eval mode, not tied.

    The only weights with values are those that the model's class leaves out of its checkpoints. These and the buffers
    get the values of ``from_pretrained``: those of the model's constructor and its ``_init_weights``.

    Returns:
        (model, {id(parameter): value} of the weights that the class leaves out).
    """
    with _meta_parameters(), private("no_init_weights")():
        model = model_class._from_config(config, dtype=dtype, **model_arguments)
    for parameter in model.parameters():
        _to_meta(parameter)  # some bypass register_parameter
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # made like a parameter; gets its values below
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    parameters, buffers = state_names(model)
    left_out = [parameters[n] for n in model._keys_to_ignore_on_save or () if n in parameters]
    for parameter in left_out:
        _swap(parameter, torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad))
    known = {id(parameter) for parameter in left_out}
    for tensor in (*parameters.values(), *buffers.values()):
        tensor._is_hf_initialized = id(tensor) not in known
    model.initialize_weights()
    constructed = {id(parameter): parameter.detach().clone() for parameter in left_out}
    for parameter in left_out:
        _to_meta(parameter)
    return model.eval(), constructed


def tie_as_checkpoint(model, present, same):
    """Ties parameters as ``from_pretrained`` would for this checkpoint.

    Args:
        model: with meta parameters.
        present: names, in the model, of the checkpoint's tensors.
        same: called with two of these names; returns whether their values are equal. Tensors that differ are not
            tied, also where the configuration ties them.
    """
    parameters, _ = state_names(model)
    missing = set(parameters) - set(present)
    for target, source in list((model.all_tied_weights_keys or {}).items()):
        if target not in missing and source not in missing:
            if same(target, source):
                missing.add(target)
            else:
                model.all_tied_weights_keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def make_flat(model):
    """Makes every meta parameter an empty one on the CPU, the same object as before.

    Returns:
        {id(parameter): full shape}.
    """
    shapes = {}
    for parameter in model.parameters():
        shapes[id(parameter)] = torch.Size(parameter.shape)
        empty = torch.nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad)
        _swap(parameter, empty)
    return shapes


@contextmanager
def _meta_parameters():
    """Context in which a parameter loses its memory when a module registers it. It stays the same object, so that
    shared parameters stay shared."""
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: _to_meta(parameter))
    try:
        yield
    finally:
        hook.remove()


def _to_meta(parameter):
    if parameter is None or parameter.is_meta:
        return
    meta = torch.empty_like(parameter, device="meta", requires_grad=False)
    _swap(parameter, torch.nn.Parameter(meta, parameter.requires_grad))


def _swap(parameter, other):
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise _C.UsageError(
            f"the model keeps references to its parameters' memory while it is built ({error}); build it as usual "
            "and pass it to strata.initialize"
        ) from error
