"""The versions of transformers whose checkpoints Strata reads and writes, and the private names that it uses.

Private functions of transformers map a checkpoint's tensors to a model's. Another version may change them. This module
lists them all, and other modules get them from here, so that Strata refuses an untested version before it converts a
checkpoint wrongly. `make test-newest` tries the newest one; CONTRIBUTING.md has the runs.
"""

import importlib
import sys

OLDEST, NEWEST = (5, 17), (5, 24)  # and all between; pyproject.toml says the same

# Module -> names, all there since 5.6. Strata also uses these attributes of models: base_model_prefix,
# all_tied_weights_keys, tie_weights(missing_keys, recompute_mapping), initialize_weights(), _from_config(),
# _weight_conversions, _keys_to_ignore_on_load_unexpected and _keys_to_ignore_on_save; of tensors _is_hf_initialized.
PRIVATE = {
    "initialization": ("no_init_weights",),
    "conversion_mapping": ("get_model_conversion_mapping",),
    "core_model_loading": ("WeightRenaming", "dot_natural_key", "rename_source_key", "revert_weight_conversion"),
    "utils.loading_report": ("LoadStateDictInfo",),  # for models that zero.Init shards, with _load_pretrained_model()
}


def is_transformers_model(model):
    """Whether ``model`` is a transformers.PreTrainedModel; imports nothing."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def private(name):
    """The object of transformers with this name, one of ``PRIVATE``. UsageError where this version of transformers is
    not supported."""
    (module,) = (module for module, names in PRIVATE.items() if name in names)
    require_supported()
    return getattr(importlib.import_module(f"transformers.{module}"), name)


def require_supported():
    """Raises UsageError where the installed transformers is not one of the supported versions; it says which are."""
    problem = unsupported()
    if problem is not None:
        from .. import _C  # here, since the doctor reads the versions where there is no engine

        raise _C.UsageError(problem)


def unsupported():
    """str: why the installed version is not supported, and the remedy; None where it is supported."""
    version = installed()
    if OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
    return (
        f"checkpoints are converted by functions of transformers that change between its versions; wanted {oldest} to "
        f"{newest}, found transformers {version}. Run pip install '{requirement()}'"
    )


def installed():
    """The version of the transformers that this process uses."""
    return importlib.import_module("transformers").__version__


def requirement():
    """The supported versions as pip takes them: "transformers>=5.17,<5.25"."""
    return f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
