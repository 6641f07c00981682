"""Operations for models: ``linear_cross_entropy`` computes a head's loss without the logits of the whole vocabulary."""

from .tiles.vocabulary_loss import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
