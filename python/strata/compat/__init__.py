"""Strata under the names of other libraries, for programs that stay unchanged."""

from strata import __version__

NAME = "deepspeed"
VERSION = f"0.19.8+strata.{__version__}"  # the DeepSpeed whose names are here, and Strata's version
VARIABLE = "STRATA_COMPAT"
