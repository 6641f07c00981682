"""Operations for models: ``linear_cross_entropy``, a head and its loss without the logits of the whole vocabulary."""

from .tiles.vocabulary_loss import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
