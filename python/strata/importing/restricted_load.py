"""Reads files of ``torch.save`` and pickles, and runs no code from them.

torch's restricted unpickler makes tensors and plain containers, and objects of the classes that this module lists: each
stands for data, and its constructor does nothing else. Empty classes stand for DeepSpeed's own, so that DeepSpeed need
not be installed. The unpickler refuses any other class; the error names it.
"""

import argparse
import errno
import pickle

import torch

from .. import _C


class ZeroStage(int):
    """Stands for DeepSpeed's ZeroStageEnum: the stage's number."""


class FragmentAddress:
    """Stands for DeepSpeed's fragment_address: ``numel`` and ``start``."""


class LossScaler:
    """Stands for DeepSpeed's LossScaler: ``cur_scale`` and ``dynamic``."""


class DynamicLossScaler:
    """Stands for DeepSpeed's DynamicLossScaler, with its state as attributes."""


def _deepspeed_classes():
    return [
        (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
        (FragmentAddress, "deepspeed.utils.tensor_fragment.fragment_address"),
        (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
        (DynamicLossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    ]


def _plain_classes():
    """Classes of scripts' own values: namespaces of arguments, and numpy's numbers and arrays of numbers."""
    import numpy

    multiarray = numpy._core.multiarray if hasattr(numpy, "_core") else numpy.core.multiarray
    classes = [(argparse.Namespace, "argparse.Namespace")]
    classes += [(numpy.ndarray, "numpy.ndarray"), (numpy.dtype, "numpy.dtype")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        classes += [(multiarray.scalar, f"{module}.scalar"), (multiarray._reconstruct, f"{module}._reconstruct")]
    types = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefd"}
    return classes + [(t, f"numpy.dtypes.{t.__name__}") for t in types]


def load_tensors(path):
    """The value that ``torch.save`` wrote to ``path``. Tensors are mapped, so that the system reads only the bytes that
    are used.

    Raises:
        FormatError: for a file that holds objects other than data (the message has their class); for one that is cut
            off.
        IoError: it is not there.
    """
    allowed = _deepspeed_classes() + _plain_classes()
    try:
        with torch.serialization.safe_globals(allowed):
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            if refused:
                raise _C.FormatError(_refusal(path, refused))
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch looks for the file's end before its beginning
            raise _C.FormatError(f"'{path}' is cut off, or no file of torch.save") from error
        raise _C.IoError(f"cannot read '{path}': {error}") from error
    except pickle.UnpicklingError as error:
        raise _C.FormatError(f"'{path}' holds more than data, and is not read: "
                             f"{str(error).splitlines()[-1]}") from error
    except _C.Error:
        raise
    except Exception as error:  # torch raises RuntimeError, ValueError, EOFError and more for damaged files
        raise _C.FormatError(f"'{path}' is cut off, or no file of torch.save: {str(error).splitlines()[0]}") from error


def _refusal(path, names):
    return (f"'{path}' holds objects of {', '.join(sorted(names)[:8])}, and is not read: making them could run code "
            "that is in the file. If you trust it and the class holds data alone, allow it with "
            "torch.serialization.add_safe_globals and call strata.importing from Python; or save again without it")
