"""Puts the script that writes whole weights beside checkpoints, where DeepSpeed's users look for it."""

import logging
import os

from .. import _C

logger = logging.getLogger("strata")

_NAME = "zero_to_fp32.py"
_TEXT = '''#!/usr/bin/env python
"""Writes the whole fp32 weights of a checkpoint that is in this folder; --help says more.

    python zero_to_fp32.py . output_dir --safe_serialization
"""

import sys

from strata.utils.zero_to_fp32 import main

if __name__ == "__main__":
    sys.exit(main())
'''


def place_script(folder):
    """Puts ``zero_to_fp32.py`` into ``folder``. A failure is only a warning: a checkpoint needs no script."""
    path = os.path.join(folder, _NAME)
    try:
        if _is_there(path):
            return
        with _C.AtomicFile(path) as script:
            with open(script.fileno(), "w", encoding="utf-8", closefd=False) as file:
                file.write(_TEXT)
            script.publish()
            os.fchmod(script.fileno(), os.fstat(script.fileno()).st_mode | 0o100)
    except (OSError, _C.IoError) as error:
        logger.warning("cannot write '%s': %s", path, error)


def _is_there(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(len(_TEXT) + 1) == _TEXT
    except FileNotFoundError:
        return False
