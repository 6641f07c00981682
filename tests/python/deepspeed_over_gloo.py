"""DeepSpeed on ranks of the CPU that exchange by gloo alone."""

import importlib


def deepspeed_over_gloo(name="deepspeed"):
    """The module ``name``. DeepSpeed itself compiles an all-reduce over shared memory, which takes a minute, and whose
    ranks wait spinning: that is switched off."""
    library = importlib.import_module(name)
    if name == "deepspeed" and "strata" not in library.__version__:
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library
