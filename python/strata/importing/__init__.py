"""Checkpoints of other libraries as checkpoints of Strata: ``python -m strata.importing``, or ``strata
import-deepspeed`` and ``strata import-dcp``."""
