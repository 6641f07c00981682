"""``load_pretrained``, ``load_weights`` and ``save_pretrained``: checkpoints of Hugging Face and sharded weights."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from . import _C
from .checkpoint.adapters import WEIGHTS, attach_adapter, holds_adapter, read_adapter_config, require_buffers
from .checkpoint.load_plan import CheckpointFiles, LoadPlan, build_model, make_flat, open_files
from .checkpoint.names import homes_of, model_tensors, names_of, state_names
from .checkpoint.saving import save_pretrained
from .checkpoint.supported_transformers import adapter, dtype_name, require_supported
from .config_source import read_config
from .start import StartUp
from .model.model_input import ModelTree, find_device, make_current
from .rank_logging import logger
from .ranks.runtime import agree_after, expected_world_size, rank_and_world_size
from .views.start_up import StartUpClock

__all__ = ["load_pretrained", "load_weights", "save_pretrained"]


def load_pretrained(path, config, *, model_class=None, optimizer=None, model_parameters=None, training_data=None,
                    lr_scheduler=None, collate_fn=None, strict=False, **model_arguments):
    """Loads a transformers checkpoint as a model under the engine, never whole on any rank. Collective. Returns
    (engine, optimizer, dataloader, lr_scheduler) as ``strata.initialize`` does.

    Strata builds the model without parameter memory; each rank reads its shards' ranges of the files. The files may
    have any floating dtype. The weights get the dtype of the configuration's precision, or without one that of
    ``from_pretrained``; fp32 master weights take the files' own values. As after ``from_pretrained`` the model is in
    eval mode: call ``engine.train()``. Parameters that the model's class freezes stay frozen.

    Args:
        path: a folder with config.json and model.safetensors or model.safetensors.index.json; or one that PEFT wrote,
            whose adapter_config.json names the folder of the base model: a PeftModel then, with its adapter trainable.
        config, optimizer, training_data, lr_scheduler, collate_fn: as ``strata.initialize`` takes them.
        model_class: a class of transformers; None: the one that config.json names in ``architectures``.
        model_parameters: None, or a callable that makes parameters or param groups from the model. All parameters are
            empty then: choose them by their names.
        strict: tensors that the model does not use are an error; else a warning.
        model_arguments: as ``from_pretrained`` takes them: ``attn_implementation``, ``dtype``.

    Raises:
        FormatError: the checkpoint contradicts itself or does not fit the model; lists missing and misshapen tensors.
        IoError: a file cannot be read. Every rank raises either error, which names the first rank that failed.
        UsageError: for a version of transformers that is not supported.
        ConfigError, CommError, OutOfMemoryError: as ``strata.initialize``.
    """
    return _PretrainedStartUp(path, model_class, strict, model_arguments, config, optimizer, model_parameters,
                              training_data, lr_scheduler, collate_fn).run()


def load_weights(engine, path, strict=False):
    """Fills the engine's weights from a checkpoint, a folder or one .safetensors file. Collective, between steps.

    The model's names find the tensors; for transformers models transformers' rules do. Each rank reads the ranges of
    the files that its shards hold. The optimizer's state does not change. Tensors that the model does not use are a
    warning, with ``strict`` an error. FormatError where the checkpoint contradicts itself or does not fit the model;
    the weights are unchanged then. IoError where a file cannot be read; the weights are a mixture then."""
    with agree_after(engine._collectives, f"opening the checkpoint '{path}'"):
        files = open_files(path)
        parameters = [(i, known.parameter, known.shape) for i, known in enumerate(engine.known)]
        names, buffers = names_of(engine.module)
        entries = _entries(parameters, names, engine._config)
        plan = LoadPlan(engine.module, files, entries, homes_of(engine.module, buffers), strict)
    _load(engine, [plan], StartUpClock())


class _PretrainedStartUp(StartUp):
    """A start whose model comes from a checkpoint. Work that needs no other ranks runs beside the phases, in threads:
    opening the device and the files, importing and building the model, planning, loading a first step's kernels."""

    def __init__(self, path, model_class, strict, model_arguments, config, optimizer, *others):
        super().__init__(config, None, optimizer, *others)
        self._path, self._model_class, self._strict, self._model_arguments = path, model_class, strict, model_arguments
        self._what = f"opening the checkpoint '{path}'"

    def run(self):
        with _beside() as self._beside:
            return super().run()

    def connect(self):
        submit = self._beside.submit
        self._opening = submit(open_runtime, self.config)
        self._files = submit(_open, self._path)
        self._class = submit(_import_class, self._path, self._files, self._model_class)
        self._warming = submit(warm_up, self._opening)
        super().connect()

    def parsed_config(self):
        config, _ = self._opening.result()
        config.complete_batch(rank_and_world_size()[1])
        return config

    def place(self):
        _, self.runtime = self._opening.result()
        make_current(self.runtime.device)
        self._building = self._beside.submit(_build_flat, self._class, self._files, self.config, self._model_arguments)
        self._planning = self._beside.submit(lambda: [plan(strict=self._strict) for plan in self._building.result()[2]])

    def build(self):
        with self.agreed(self._what):
            with self.clock.phase("open checkpoint"):
                self._files.result()
            with self.clock.phase("build model"):
                model, self.from_files, _ = self._building.result()
                if callable(self.model_parameters):
                    self.model_parameters = self.model_parameters(model)
                self.tree = ModelTree(model)

    def finish(self):
        try:
            with self.agreed(self._what), self.clock.phase("plan"):
                plans = self._planning.result()
            _load(self.engine, plans, self.clock)
            if not self._warming.done():
                with self.clock.phase("warm up"):
                    self._warming.result()
            super().finish()
        except BaseException:
            self.engine.destroy()
            raise


@contextmanager
def _beside():
    """An executor for work that needs no other ranks; all of it has ended when the context ends. Only importing and
    building the model hold Python's lock for long. Threads switch more often meanwhile, since those that wait need the
    lock only briefly. Each piece of work has a thread, since some wait for others."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, 5e-4))
    try:
        with ThreadPoolExecutor(6, "strata-start") as beside:
            yield beside
    finally:
        sys.setswitchinterval(interval)


def open_runtime(config):
    """(_C.Config, whose batch sizes may be incomplete, _C.Runtime for it) of a model that comes from files. In any
    thread; Python's lock is free while the device is opened, and torch's current device does not change."""
    parsed = read_config(config)
    runtime = _C.Runtime(find_device(parsed), parsed.threads, expected_world_size())
    runtime.expect_values()
    return parsed, runtime


def warm_up(opening):
    """Loads the kernels of a first step on a GPU, beside a start, once ``opening``, a future of ``open_runtime()``, is
    done. Never raises: the step tries to load again, and reports the error."""
    if opening.exception() is not None:
        return
    config, runtime = opening.result()
    if runtime.device.type != "cuda":
        return
    try:
        _C.warm_up(runtime.device, getattr(torch, config.dtype or "bfloat16"))
    except Exception as error:
        logger.debug("nothing was loaded for the first step beforehand: %s", error)


class _Opened(NamedTuple):
    """A model's files, and the files and configuration of the adapter where the path is one of PEFT's."""

    base: CheckpointFiles
    adapter: CheckpointFiles = None
    adapter_config: object = None


def _open(path):
    if not holds_adapter(path):
        return _Opened(open_files(path))
    adapter_config, base = read_adapter_config(path)
    return _Opened(open_files(base), open_files(os.path.join(path, WEIGHTS)), adapter_config)


def _build_flat(importing, opening, config, model_arguments):
    """(model, {id(parameter): full shape}, [LoadPlan without ``strict``]): tied as the checkpoint is, no memory."""
    model_class, model_config = importing.result()
    opened = opening.result()
    base, constructed = _build(model_class, model_config, opened, config.dtype, model_arguments)
    _tie(base, opened.base)
    named, buffers = names_of(base)
    model, of_adapter = base, {}
    if opened.adapter is not None:
        model, in_file = attach_adapter(base, opened.adapter_config)
        all_names, _ = names_of(model)
        adapter_buffers = {name: tensor for name, tensor in in_file.items() if id(tensor) not in all_names}
        require_buffers(adapter_buffers, opened.adapter.leaves.listed, opened.adapter.path)
        for name, parameter in in_file.items():
            if name in adapter_buffers:
                continue
            if id(parameter) not in named or name in opened.adapter.leaves.listed:
                of_adapter.setdefault(id(parameter), []).append(name)
        of_adapter |= {key: names for key, names in all_names.items() if key not in named and key not in of_adapter}
    shapes = make_flat(model)
    parameters = [(i, p, shapes[id(p)]) for i, p in enumerate(model.parameters())]
    of_base = {key: names for key, names in named.items() if key not in of_adapter}
    constructed = {i: constructed[id(p)] for i, p, _ in parameters if id(p) in constructed}
    homes, entries = homes_of(base, buffers), _entries(parameters, of_base, config)
    plans = [partial(LoadPlan, base, opened.base, entries, homes, constructed=constructed)]
    if opened.adapter is not None:
        homes = homes_of(model, adapter_buffers)
        plans.append(partial(LoadPlan, model, opened.adapter, _entries(parameters, of_adapter, config), homes))
    return model.eval(), shapes, plans


def _import_class(path, opening, model_class):
    """(class of the model, its configuration). Importing transformers and the class takes most of a start's time."""
    if holds_adapter(path):
        opening.result()  # it imports peft, and so transformers: only one thread at a time can import a package
    import transformers

    require_supported()
    path = opening.result().base.path  # this folder exists; transformers would ask the network for a missing one
    config = transformers.AutoConfig.from_pretrained(path)
    if model_class is None:
        name = (config.architectures or [None])[0]
        model_class = getattr(transformers, name or "", None)
        if model_class is None:
            raise _C.FormatError(
                f"{path}: config.json names no architecture of transformers {transformers.__version__}; pass "
                f"model_class=<class>. Found architectures {config.architectures}")
    return model_class, config


def _build(model_class, config, opened, precision, model_arguments):
    import transformers

    arguments = dict(model_arguments)
    given = arguments.pop("dtype", None)
    dtype = precision or _dtype_as_loaded(given, config, opened)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model, constructed = build_model(model_class, config, dtype, arguments)
    path = opened.base.path
    if model.can_generate() and os.path.exists(os.path.join(path, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model, constructed


def _dtype_as_loaded(given, config, opened):
    """The dtype in which ``from_pretrained(dtype=given)`` builds a model. "auto" is the dtype of the model's
    configuration, or that of the checkpoint's first floating tensor."""
    given = adapter().DEFAULT_DTYPE if given is None else given
    if given != "auto":
        return given
    if getattr(config, dtype_name(config)) is not None:
        return getattr(config, dtype_name(config))
    dtypes = (dtype for _, dtype in opened.base.leaves.listed.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.get_default_dtype())


def _tie(model, files):
    if not adapter().tied_names(model):
        return
    parameters, buffers = state_names(model)
    found, _ = model_tensors(model, {*parameters, *buffers}, files.leaves)

    def same(one, other):
        a, b = found[one], found[other]
        return a.source is not None and b.source is not None and files.checkpoint.same(a.source, b.source)

    adapter().tie(model, parameters.keys() - found.keys(), same)


def _entries(parameters, names, config):
    """The argument ``parameters`` of a LoadPlan: those of [(index, parameter, full shape)] whose ids have ``names``."""
    return [(index, names[id(p)], list(shape), config.weight_dtype(p.dtype))
            for index, p, shape in parameters if id(p) in names]


def _load(engine, plans, clock):
    with clock.phase("meet"):
        for plan in plans:
            plan.read(engine.core, engine.known)
        with agree_after(engine._collectives, "reading the weights"), torch.no_grad(), clock.phase("compute"):
            for plan in plans:
                plan.compute(engine.core, engine.known)
    _C.weights_changed(engine.core)
    for plan in plans if engine.global_rank == 0 else ():
        plan.warn()
