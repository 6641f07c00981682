"""transformers 5.3 to 5.5: as 5.6, but a conversion does not say whether it was used, and a model keeps all that its
class has. ``supported_transformers`` says what the functions do."""

from .supported_transformers import private
from .transformers_5_6 import (
    DEFAULT_DTYPE,
    INITIALIZES_MISSING,
    build,
    building,
    found_by_conversions,
    initialize,
    loaded,
    loading,
    tie,
    tied_names,
    to_files,
)

__all__ = [
    "DEFAULT_DTYPE", "INITIALIZES_MISSING", "build", "building", "initialize", "loaded", "loading", "tie", "tied_names",
    "to_files", "to_model",
]  # fmt: skip


def to_model(model, known, tensors):
    """The model does not keep conversions of legacy names: transformers' own ``save_pretrained`` would write these."""
    mapping = private("get_model_conversion_mapping")
    model._weight_conversions = mapping(model, add_legacy=False)
    return found_by_conversions(model, mapping(model), known, tensors)
