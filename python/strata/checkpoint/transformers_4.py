"""transformers 4.55 to 4.57: a checkpoint's tensor is one of the model's, under another name at most. Names differ by
legacy renames, by a map that old classes of vision-language models have, and by the base model's prefix."""

import re

from .. import _C
from ..views import logger
from .names import state_names
from .supported_transformers import Loading, private

DEFAULT_DTYPE = "float32"
INITIALIZES_MISSING = True


def initialize(model, missing):
    """transformers initializes whole modules, those that are not marked."""
    _, buffers = state_names(model)
    kept = [(buffer, buffer.clone()) for buffer in buffers.values() if id(buffer) not in missing]

    def mark(module):
        own = (*dict.values(module._parameters), *module._buffers.values())
        module._is_hf_initialized = not missing.intersection(map(id, own)) and all(
            child._is_hf_initialized for child in module.children())

    model.apply(mark)
    model.initialize_weights()
    for buffer, value in kept:
        buffer.copy_(value)


def tie(model, missing, same):
    """transformers ties what the configuration ties, also where the checkpoint has two tensors that differ."""
    before, _ = state_names(model)
    model.tie_weights()
    source_of = {id(parameter): name for name, parameter in before.items()}
    for name, parameter in state_names(model)[0].items():
        source = source_of.get(id(parameter), name)
        if source != name and not missing & {name, source} and not same(name, source):
            logger.warning("the checkpoint's '%s' is not used: the configuration ties it to '%s', which differs", name,
                           source)


def tied_names(model):
    patterns = private("_get_tied_weight_keys")(model)
    return {name for name in state_names(model)[0] if any(re.search(pattern, name) for pattern in patterns)}


def to_model(model, known, tensors):
    prefix, names = model.base_model_prefix, list(tensors)
    in_file = bool(prefix) and any(name.startswith(prefix) for name in names)
    in_model = bool(prefix) and hasattr(model, prefix)
    try:
        renamed = model._get_key_renaming_mapping(names, _key_mapping(model), in_file and not in_model,
                                                  in_model and not in_file)
    except ValueError as error:
        raise _C.FormatError(f"transformers cannot name the checkpoint's tensors: {error}") from error
    found = {target: tensors[name] for name, target in renamed.items() if target in known}
    return found, [name for name in names if renamed.get(name) not in known]


def to_files(model, tensors):
    mapping = {after: re.sub(r"\(.*\)", "", before.lstrip("^"))
               for before, after in (_key_mapping(model) or {}).items()}
    saved = {}
    for name, tensor in tensors.items():
        changed = (re.subn(pattern, before, name) for pattern, before in mapping.items())
        saved[next((new for new, count in changed if count), name)] = tensor
    return model._fix_state_dict_keys_on_save(saved)


def _key_mapping(model):
    """{pattern of a name in files: name in the model}, or None. Only some classes use the map that they have."""
    listed = any(name in cls.__name__.lower() for cls in type(model).__mro__[:-1] for name in private("VLMS"))
    return model._checkpoint_conversion_mapping if listed else None


# --- ``from_pretrained`` of a model that zero.Init has sharded ---


def loading(given):
    as_usual = (getattr(given, "key_mapping", None) or None) == (_key_mapping(given.model) or None)
    return Loading(given.state_dict, given.checkpoint_files, getattr(given, "hf_quantizer", None) is not None, as_usual)


def loaded(model, missing):
    return model, sorted(missing), [], [], None, []
