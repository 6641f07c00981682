"""Writes checkpoints of Strata as files of other libraries, so that these can continue the training."""
