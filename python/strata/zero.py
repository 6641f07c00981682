"""``zero.Init`` and ``zero.GatheredParameters``, as DeepSpeed has them."""

from ._gathered import GatheredParameters
from ._init import Init

__all__ = ["GatheredParameters", "Init"]
