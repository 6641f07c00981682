"""transformers 5.3 to 5.24: a list of conversions makes a model's tensors of a checkpoint's, and the reverse."""

import dataclasses
import re
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from operator import attrgetter

from .. import _C
from .names import state_names
from .repeated_blocks import found_by_blocks
from .supported_transformers import Loading, installed, private

DEFAULT_DTYPE = "auto"
INITIALIZES_MISSING = False
_NUMBER_IN_PATTERN = re.compile(r"(?<![A-Za-z0-9_])\d")  # not that of a name, as in "w1"


def initialize(model, missing):
    for tensors in state_names(model):
        for tensor in tensors.values():
            tensor._is_hf_initialized = id(tensor) not in missing
    model.initialize_weights()


def tie(model, missing, same):
    """Tensors that differ are not tied, also where the configuration ties them."""
    missing, tied = set(missing), model.all_tied_weights_keys
    for target, source in list(tied.items()):
        if target not in missing and source not in missing:
            if same(target, source):
                missing.add(target)
            else:
                tied.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def tied_names(model):
    return model.all_tied_weights_keys or ()


def to_model(model, known, tensors):
    """The model keeps the conversions that were used, as after ``from_pretrained``, for ``to_files``. Before 5.6 no
    conversion says whether it was used. There the model does not keep those of legacy names, which transformers' own
    ``save_pretrained`` would write."""
    conversions = private("get_model_conversion_mapping")
    mapping = conversions(model)
    convert = partial(_converted, model, mapping, known, tensors)
    answer = None
    if not any(_NUMBER_IN_PATTERN.search(pattern) for c in mapping for pattern in c.source_patterns):
        with suppress(_C.FormatError):  # with all names there may be no error, or one that says more
            answer = found_by_blocks(convert, tensors, known)
    found, unexpected = answer or convert(tensors)
    if all(hasattr(c, "was_used") for c in mapping):
        model._weight_conversions = [c for c in mapping if c.was_used()]
    else:
        model._weight_conversions = conversions(model, add_legacy=False)
    return found, _in_natural_order(unexpected)


def to_files(model, tensors):
    return private("revert_weight_conversion")(model, tensors)


def _converted(model, mapping, known, tensors, asked):
    """``model_tensors`` for the names ``asked``, by transformers' conversions ``mapping``."""
    renaming, rename_source_key = private("WeightRenaming"), private("rename_source_key")
    renamings = [c for c in mapping if isinstance(c, renaming)]
    converters = [c for c in mapping if not isinstance(c, renaming)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    names = dict.fromkeys(known, True)
    groups, unexpected = {}, []  # the conversion that makes each tensor of the model
    for name in _in_natural_order(asked):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target not in names and name in names:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, names)
        if target not in names:
            unexpected.append(name)
            continue
        if target not in groups:
            groups[target] = renaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        groups[target].add_tensor(target, name, name if pattern is None else pattern, tensors[name])
    converted = {}
    for target, group in groups.items():
        sources = [name for names in group.layer_targets.values() for name in names]
        try:
            result = group.convert(target, model=model, config=model.config)
        except Exception as error:
            steps = [type(step).__name__ for step in getattr(group, "operations", ())] or ["renaming"]
            raise _C.FormatError(
                f"transformers {installed()} cannot make '{target}' of the checkpoint's {sorted(sources)[:4]} "
                f"({len(sources)} tensors) by {', '.join(steps)}: {error}") from error
        for name, tensor in result.items():
            converted[name] = tensor[0] if isinstance(tensor, list) else tensor
    return converted, unexpected


def _in_natural_order(names):
    """Sorts as transformers does: numbers count as numbers, so that expert 10 comes after expert 2. A name's key
    consists of its parts' keys, which are cached: ten thousand names have some hundred different parts."""
    dot_natural_key = private("dot_natural_key")

    @cache
    def key_of(part):
        (key,) = dot_natural_key(part)
        return key

    return sorted(names, key=lambda name: [*map(key_of, name.split("."))])


# --- ``from_pretrained`` of a model that zero.Init has sharded ---


def loading(given):
    config = given.load_config
    patterns = attrgetter("source_patterns", "target_patterns")
    usual = private("get_model_conversion_mapping")(given.model)
    as_usual = [*map(patterns, config.weight_mapping or [])] == [*map(patterns, usual)]
    whole = getattr(given, "expected_keys", None) is None
    return Loading(given.state_dict, given.checkpoint_files, config.hf_quantizer is not None, whole and as_usual)


def loaded(model, missing):
    kind = private("LoadStateDictInfo")
    values = {"missing_keys": set(missing), "error_msgs": [], "conversion_errors": {}}
    return kind(**{field.name: values.get(field.name, set()) for field in dataclasses.fields(kind)}), None
