"""Writes files of ``torch.save``, and sets of files, that are complete or absent. Puts the script that writes whole
weights beside checkpoints, where DeepSpeed's users look for it."""

import os
import shutil
import tempfile
from contextlib import ExitStack, contextmanager, suppress

import torch

from .. import _C
from ..views import logger


def save_whole_file(value, path):
    """``torch.save(value, path)``. The file has a random temporary name until all of it is on disk. Makes the folder.
    IoError where it cannot be written: an earlier file does not change then, and no temporary file is left."""
    folder, name = os.path.split(path)
    with SavedTogether(folder or ".") as files:
        files.add(value, name)
        files.publish()


class SavedTogether(ExitStack):
    """Context for several files of ``torch.save`` in one folder, which is made if need be. The files get their names in
    ``publish``; the end of the context removes files that have none. IoError where a file cannot be written."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self._files = []  # _C.AtomicFile objects, on disk
        with _saying_where(folder):
            os.makedirs(folder, exist_ok=True)

    def add(self, value, name):
        """Brings ``value`` to disk."""
        path = os.path.join(self._folder, name)
        with _saying_where(path):
            self._files.append(self.enter_context(_C.AtomicFile(path)))
            with open(self._files[-1].fileno(), "wb", closefd=False) as file:
                torch.save(value, file)
            os.fsync(self._files[-1].fileno())  # a full disk is an error before any file has its name

    def publish(self):
        """Gives every file its name, in the order in which they came."""
        for file in self._files:
            file.publish()


def file_bytes(size):
    """int: bytes of one file at most, from a number, or a text such as "5GB" or "512MiB". UsageError for others."""
    size_bytes = size if isinstance(size, int) else _C.parse_size(size)
    if size_bytes is None:
        raise _C.UsageError(f"max_shard_size must be a number of bytes or like '5GB' or '512MiB'; got {size!r}")
    return size_bytes


@contextmanager
def moved_into(folder, what):
    """Context that gives an empty folder. When it ends without an exception, its files replace those of ``folder`` one
    by one; else ``folder`` does not change. IoError, which names ``what``, where a file cannot be written or moved."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            yield temporary
            for path, _, files in os.walk(temporary):
                target = os.path.join(folder, os.path.relpath(path, temporary))
                os.makedirs(target, exist_ok=True)
                for file in sorted(files, reverse=True):
                    shutil.move(os.path.join(path, file), os.path.join(target, file))
    except OSError as error:
        raise _C.IoError(f"{what} could not be written: path={folder}: {error}") from error


@contextmanager
def _saying_where(path):
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where it cannot write
        raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error


# --- the script ---

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
        with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
            if file.read(len(_TEXT) + 1) == _TEXT:
                return
        _C.write_file_atomically(path, _TEXT)
        os.chmod(path, os.stat(path).st_mode | 0o100)
    except (OSError, _C.IoError) as error:
        logger.warning("cannot write '%s': %s", path, error)
