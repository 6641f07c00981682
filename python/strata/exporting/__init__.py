"""Checkpoints of Strata in the files of other libraries, so that training can go on there."""
