"""``from_pretrained`` under stage 3: each rank reads its own shards' ranges of the files.

In transformers' own way every rank reads every file, and gathers, overwrites and shards one module after another. Where
``checkpoint/names.py`` can map a checkpoint's tensors to the model's, Strata instead gathers nothing and moves nothing
between ranks. Otherwise it takes transformers' way, and logs the reason once."""

import functools
import inspect
import os
import sys
from types import SimpleNamespace

import torch

from .. import _C
from ..checkpoint.load_plan import LoadPlan, open_files
from ..checkpoint.names import model_tensors, state_names
from ..checkpoint.supported_transformers import adapter, unsupported
from ..model.parameter import owner_of
from ..rank_logging import logger
from ..ranks.runtime import agree_after
from ..zero import GatheredParameters

_told = set()  # reasons


def install():
    """Makes transformers, where it is imported, load models that ``zero.Init`` has sharded through this module."""
    modeling = sys.modules.get("transformers.modeling_utils")
    load = getattr(getattr(modeling, "PreTrainedModel", None), "_load_pretrained_model", None)
    if load is None or hasattr(load, "_strata_instead") or unsupported() is not None:
        return

    @functools.wraps(load)
    def _load_pretrained_model(model, *args, **kwargs):
        collectives = _collectives_of(model)
        if collectives is None:
            return load(model, *args, **kwargs)
        given = inspect.signature(load).bind(model, *args, **kwargs).arguments
        result = _load(model, adapter().loading(SimpleNamespace(**given)), collectives)
        if result is None:
            result = load(model, *args, **kwargs)
        _mark_loaded_modules(model)
        return result

    _load_pretrained_model._strata_instead = True
    modeling.PreTrainedModel._load_pretrained_model = staticmethod(_load_pretrained_model)


def _mark_loaded_modules(model):
    """Marks modules whose tensors all have their values. Transformers would else read each tensor, only to find that it
    needs no initialization, and a read gathers."""
    for module in model.modules():
        passing = module._non_persistent_buffers_set
        saved = [buffer for name, buffer in module._buffers.items() if name not in passing]
        lasting = [t for t in (*dict.values(module._parameters), *saved) if t is not None]
        if lasting and all(getattr(t, "_is_hf_initialized", False) for t in lasting):
            module._is_hf_initialized = True


def _collectives_of(model):
    """The _C.Collectives of a model that ``zero.Init`` has sharded over several ranks; None for another model."""
    cores = (owner_of(parameter)[0] for parameter in state_names(model)[0].values())
    return next((core.collectives for core in cores if core is not None), None)


class _Unfit(Exception):
    """The reason why Strata takes transformers' own way."""


def _load(model, loading, collectives):
    """The result of transformers' function; None where its own way has to be taken. Collective."""
    plans, reason = None, ""
    with agree_after(collectives, "from_pretrained: planning what is read"):
        try:
            plans = _Plans(model, _files_of(loading))
        except (_Unfit, _C.Error, OSError) as error:
            reason = str(error) or type(error).__name__
    reason = next(filter(None, collectives.all_gather_text(reason)), None)
    if reason is not None:
        if collectives.rank == 0 and reason not in _told:
            _told.add(reason)
            logger.warning("from_pretrained has transformers gather one module after another, which is slower than "
                           "reading shards from the files: %s", reason)
        return None
    return plans.run(collectives)


def _files_of(loading):
    """The ``CheckpointFiles``, or _Unfit where Strata cannot read them."""
    files = loading.files
    if loading.state_dict is not None or not files:
        raise _Unfit("the weights come from a state dict, not from files")
    if loading.quantized:
        raise _Unfit("the checkpoint is quantized")
    if not loading.as_usual:
        raise _Unfit("the script gives a key_mapping or expected keys of its own")
    if not all(str(file).endswith(".safetensors") for file in files):
        raise _Unfit(f"'{files[0]}' is no .safetensors file; save the model again as safetensors")
    return open_files(files[0] if len(files) == 1 else os.path.dirname(files[0]))


class _Plans:
    """The LoadPlans of all cores that ``zero.Init`` has made for a model. _Unfit or FormatError where the checkpoint's
    tensors cannot be mapped to the model's."""

    def __init__(self, model, files):
        self._model = model
        self._parameters, self._buffers = state_names(model)
        if adapter().INITIALIZES_MISSING and len({*map(id, self._parameters.values())}) < len(self._parameters):
            raise _Unfit("this transformers ties parameters before it loads them, and so reads them")
        self._found, _ = model_tensors(model, {*self._parameters, *self._buffers}, files.leaves)
        by_core = {}
        for name, parameter in self._parameters.items():
            if name not in self._found:
                continue
            core, index = owner_of(parameter)
            if core is None:
                raise _Unfit(f"'{name}' is not sharded")
            shape, found = list(core.full_shape(index)), list(self._found[name].shape)
            if found != shape:
                raise _Unfit(f"'{name}' has shape {found} in the checkpoint, {shape} in the model")
            by_core.setdefault(id(core), (core, []))[1].append((index, [name], shape, parameter.dtype))
        self._plans = [(core, LoadPlan(model, files, entries, {}, found=self._found))
                       for core, entries in by_core.values()]
        self._read = files.checkpoint.read

    def run(self, collectives):
        """Reads the shards. Collective. Returns the result of transformers' function. IoError on every rank names the
        first that failed."""
        state = {**self._parameters, **self._buffers}
        missing = state.keys() - self._found.keys()
        if missing and adapter().INITIALIZES_MISSING:
            self._initialize({id(state[name]) for name in missing})
        reader = _C.WeightReader(self._plans[0][0]) if self._plans else None
        with torch.no_grad():
            for core, plan in self._plans:
                plan.read(core, reader=reader)
                with agree_after(collectives, "from_pretrained: reading the weights"):
                    plan.compute(core)
                _C.weights_changed(core)
            with agree_after(collectives, "from_pretrained: reading the buffers"):
                for name, buffer in self._buffers.items():
                    if name in self._found:
                        buffer.copy_(self._found[name].compute(self._read))
        for name in state.keys() - missing:
            state[name]._is_hf_initialized = True  # so that transformers does not initialize it
        return adapter().loaded(self._model, missing)

    def _initialize(self, missing):
        """Gives tensors with these ids their values, rank 0's on every rank; those beside them in a module are read
        later. Collective."""
        of_modules = [[*module.parameters(recurse=False)] for module in self._model.modules()]
        touched = [p for own in of_modules if missing.intersection(map(id, own)) for p in own]
        with GatheredParameters(touched, modifier_rank=0):
            adapter().initialize(self._model, missing)
