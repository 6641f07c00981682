"""``import strata.compat.deepspeed``, before transformers and accelerate: ``deepspeed`` is Strata in this process."""

from .activation import activate

activate()
