"""Parameters that are gathered, used and reduced in tiles: rows of one parameter at a time."""

from .rules import TilingRule, register_tiling

__all__ = ["TilingRule", "register_tiling"]
