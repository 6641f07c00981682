"""Builders of DeepSpeed's operators. Scripts ask them whether an operator is available: Strata has the same work built
in, so they build nothing."""

from .refusal import Refusal, refused

_WHAT = Refusal("DeepSpeed's own operators", "Strata has its own; `strata bench-io` measures drives.")


class _Builder:
    """One operator.

    Attributes:
        NAME: str, DeepSpeed's name of it.
    """

    NAME = ""

    def is_compatible(self, verbose=False):
        """True: Strata does the same work by itself."""
        return True

    def load(self, verbose=True):
        """Raises NotImplementedError: there is no such module to call."""
        return refused(f"deepspeed.ops.op_builder.{type(self).__name__}.load", _WHAT)()


class AsyncIOBuilder(_Builder):
    """Reads and writes of drives."""

    NAME = "async_io"


class CPUAdamBuilder(_Builder):
    """Adam on the host."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(_Builder):
    """Adagrad on the host."""

    NAME = "cpu_adagrad"


class CPULionBuilder(_Builder):
    """Lion on the host."""

    NAME = "cpu_lion"


class FusedAdamBuilder(_Builder):
    """Adam on a GPU."""

    NAME = "fused_adam"


class FusedLionBuilder(_Builder):
    """Lion on a GPU."""

    NAME = "fused_lion"


class FusedLambBuilder(_Builder):
    """LAMB on a GPU, which Strata does not offer."""

    NAME = "fused_lamb"

    def is_compatible(self, verbose=False):
        """False: there is no LAMB."""
        return False


class UtilsBuilder(_Builder):
    """Flattening of tensors."""

    NAME = "utils"


BUILDERS = (AsyncIOBuilder, CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder, FusedAdamBuilder, FusedLionBuilder,
            UtilsBuilder)  # fmt: skip
COMPATIBLE = {**{builder.NAME: True for builder in BUILDERS}, FusedLambBuilder.NAME: False}
