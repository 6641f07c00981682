"""Converts checkpoints of other libraries to checkpoints of Strata: ``python -m strata.importing``, or ``strata
import-deepspeed`` and ``strata import-dcp``."""
