"""The metadata of the distribution "deepspeed" in ``importlib.metadata`` while Strata stands in for it."""

import importlib.metadata

from .identity import NAME, VERSION

_TEXTS = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
    "Summary: Strata under the names of DeepSpeed\n",
    "top_level.txt": f"{NAME}\n",
}


class Distribution(importlib.metadata.Distribution):
    """Metadata without files."""

    def read_text(self, filename):
        """The text of METADATA or top_level.txt; None of other files."""
        return _TEXTS.get(filename)

    def locate_file(self, path):
        """The same path: the distribution has no files."""
        return path
