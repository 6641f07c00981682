"""What the stand-in calls itself."""

from strata import __version__

NAME = "deepspeed"
VERSION = f"0.19.8+strata.{__version__}"  # what frameworks may assume of the names, and who stands behind them
VARIABLE = "STRATA_COMPAT"
