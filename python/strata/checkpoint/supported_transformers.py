"""The versions of transformers whose checkpoints Strata reads and writes, and the adapter of each generation.

Private functions of transformers map a checkpoint's tensors to a model's, and they change between versions. A
generation is the versions that one adapter serves, a module beside this one. Only the adapters and this module use
private names of transformers, and nothing else asks for a version. Strata refuses an untested version before it
converts a checkpoint wrongly; a model that the script built trains with any version. ``make test-transformers
VERSION=...`` runs the tests with a version, ``make test-newest`` with the newest one; CONTRIBUTING.md has the runs.

Every adapter has these functions. ``model`` is a transformers.PreTrainedModel.

    initialize(model, missing)      gives tensors whose ids are in ``missing`` the values of ``from_pretrained``
    tie(model, missing, same)       ties parameters as from_pretrained would. ``missing``: names that the checkpoint
                                    lacks; ``same``: of two other names, whether the values are equal
    tied_names(model)               names that may be tied to another name, which is the one in a file
    to_model(model, known, tensors) ``names.model_tensors``, with ignored names among the unused ones
    to_files(model, tensors)        ``names.saved_tensors``
    loading(given)                  Loading, of the arguments of PreTrainedModel._load_pretrained_model
    loaded(model, missing)          the result of that function, once all but the names ``missing`` are read
    DEFAULT_DTYPE                   the ``dtype`` of ``from_pretrained`` where none is given
    INITIALIZES_MISSING             whether that function also gives missing tensors their values
"""

import importlib
import sys
from typing import NamedTuple


class Generation(NamedTuple):
    """Versions (major, minor) from the oldest to the newest, and the private names that their adapter uses."""

    adapter: str
    oldest: tuple
    newest: tuple
    private: dict  # module -> names

    def __str__(self):
        return "{}.{} to {}.{}".format(*self.oldest, *self.newest)


class Loading(NamedTuple):
    """The arguments of ``_load_pretrained_model``: a state dict, or files; whether the checkpoint is quantized; whether
    it is read whole, by the class's own names."""

    state_dict: object
    files: list
    quantized: bool
    as_usual: bool


_CONVERSIONS = {
    "initialization": ("no_init_weights",),
    "conversion_mapping": ("get_model_conversion_mapping",),
    "core_model_loading": ("WeightRenaming", "dot_natural_key", "rename_source_key", "revert_weight_conversion"),
    "utils.loading_report": ("LoadStateDictInfo",),  # for models that zero.Init shards
}
_NAMES = {"modeling_utils": ("VLMS", "_get_tied_weight_keys", "no_init_weights")}
GENERATIONS = (  # pyproject.toml says the same
    Generation("transformers_4", (4, 55), (4, 57), _NAMES),
    Generation("transformers_5", (5, 3), (5, 24), _CONVERSIONS),
)


def is_transformers_model(model):
    """Whether ``model`` is a transformers.PreTrainedModel; imports nothing."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def adapter():
    """The module of the installed version's generation. UsageError where this version is not supported."""
    require_supported()
    return importlib.import_module(f".{_generation().adapter}", __package__)


def private(name):
    """The object of transformers with this name, one of those that the generation lists. UsageError where this version
    of transformers is not supported."""
    require_supported()
    (module,) = (module for module, names in _generation().private.items() if name in names)
    return getattr(importlib.import_module(f"transformers.{module}"), name)


def build(cls, config, dtype, arguments):
    """A model of class ``cls``, in the dtype; its constructors compute no values. ``arguments``: of from_pretrained."""
    with private("no_init_weights")():
        return cls._from_config(config, **{dtype_name(config): dtype}, **arguments)


def require_supported():
    """Raises UsageError where the installed transformers is not one of the supported versions; it says which are."""
    problem = unsupported()
    if problem is not None:
        from .. import _C  # here, since the doctor reads the versions where there is no engine

        raise _C.UsageError(problem)


def unsupported():
    """str: why the installed version is not supported, and the remedy; None where it is supported."""
    if _generation() is not None:
        return None
    return ("checkpoints are converted by functions of transformers that change between its versions; wanted "
            f"{' or '.join(map(str, GENERATIONS))}, found transformers {installed()}. A model that the script builds "
            f"trains with this version, too. To load and save checkpoints, run pip install '{requirement()}'")


def dtype_name(config):
    """The attribute of a model's configuration, and the argument of its constructor: "torch_dtype" before 4.56."""
    return "dtype" if hasattr(config, "dtype") else "torch_dtype"


def installed():
    """The version of the transformers that this process uses."""
    return importlib.import_module("transformers").__version__


def _generation():
    version = tuple(int(part) for part in installed().split(".")[:2])
    return next((one for one in GENERATIONS if one.oldest <= version <= one.newest), None)


def requirement():
    """The supported versions as pip takes them: "transformers>=4.55,<5.25,!=5.0.*"."""
    gaps = [f",!={before.newest[0] + 1}.{minor}.*" for before, after in zip(GENERATIONS, GENERATIONS[1:])
            for minor in range(after.oldest[1]) if after.oldest[0] > before.newest[0]]
    (major, minor), newest = GENERATIONS[0].oldest, GENERATIONS[-1].newest
    return f"transformers>={major}.{minor},<{newest[0]}.{newest[1] + 1}{''.join(gaps)}"
