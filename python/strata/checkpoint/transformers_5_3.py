"""transformers 5.3 to 5.5: as 5.6, but a conversion does not say whether it was used."""

from . import transformers_5_6
from .supported_transformers import private


def __getattr__(name):  # of all that is not below
    return getattr(transformers_5_6, name)


def to_model(model, known, tensors):
    """The model does not keep conversions of legacy names: transformers' own ``save_pretrained`` would write these."""
    mapping = private("get_model_conversion_mapping")
    model._weight_conversions = mapping(model, add_legacy=False)
    return transformers_5_6.found_by_conversions(model, mapping(model), known, tensors)
