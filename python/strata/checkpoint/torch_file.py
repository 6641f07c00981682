"""Files of ``torch.save`` that are there whole or not at all."""

import os

import torch

from .. import _C


def save_whole_file(value, path):
    """``torch.save(value, path)``, under a temporary name that nobody can guess until all of it is on disk. Makes the
    folder.

    Raises:
        IoError: the file cannot be written. A file that was there stays as it was, and nothing is left beside it.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with _C.AtomicFile(path) as whole:
            with open(whole.fileno(), "wb", closefd=False) as file:
                torch.save(value, file)
            whole.publish()
    except (OSError, RuntimeError) as error:  # torch has RuntimeError for what it cannot write
        raise _C.IoError(f"cannot write '{path}': {error}; choose another folder or make room") from error
