"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for each of its states."""

import math
import os

import torch

from .. import _C
from .restricted_load import load_tensors
from .whole_tensors import VALUE, Stored

_NAMES = {"fp32": VALUE}  # names of files whose kinds have other names in Strata


class UniversalStates:
    """The states of all parameters, read one at a time.

    Attributes:
        stage, param_groups, loss_scaler: as of ``FlatStates``.
    """

    def __init__(self, folder):
        self._folder = folder
        path = os.path.join(folder, "optimizer_state.pt")
        content = load_tensors(path) if os.path.exists(path) else {}
        inner = content.get("optimizer_state_dict", content.get("base_optimizer_state")) or {}
        self.stage = int(content.get("zero_stage", 1))
        self.param_groups = content.get("param_groups", inner.get("param_groups"))
        self.loss_scaler = content.get("loss_scaler")
        self._step = max((self._number(state["step"]) for state in inner.get("state", {}).values() if "step" in state),
                         default=None)

    def kinds_of(self, name, shape):
        """{kind: Stored} of a parameter."""
        folder = self._folder_of(name)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = [name for name in names if name.endswith(".pt") and name != "step.pt"]
        if "fp32.pt" not in files:
            raise _C.IoError(f"'{folder}' has no 'fp32.pt': the checkpoint lacks the values of '{name}'")
        kinds = {VALUE: None}
        for file in files:
            path = os.path.join(folder, file)
            found = self._tensor(path)
            if found.numel() != math.prod(shape):
                raise _C.FormatError(f"'{path}' has {found.numel()} elements; wanted {math.prod(shape)} of shape "
                                     f"{list(shape)}")
            kind = file.removesuffix(".pt")
            kinds[_NAMES.get(kind, kind)] = Stored(found.dtype, lambda path=path: self._tensor(path))
        return kinds

    def scalars_of(self, name):
        """{"step": number} where it is known."""
        path = os.path.join(self._folder_of(name), "step.pt")
        if os.path.exists(path):
            return {"step": self._number(load_tensors(path))}
        return {} if self._step is None else {"step": self._step}

    def _folder_of(self, name):
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir):
            raise _C.FormatError(f"'{self._folder}': '{name}' is no name of a parameter")
        return os.path.join(self._folder, name)

    @staticmethod
    def _tensor(path):
        content = load_tensors(path)
        tensor = content.get("param") if isinstance(content, dict) else content
        if not isinstance(tensor, torch.Tensor):
            raise _C.FormatError(f"'{path}' holds no tensor")
        return tensor.detach()

    @staticmethod
    def _number(value):
        return value.item() if isinstance(value, torch.Tensor) else value
