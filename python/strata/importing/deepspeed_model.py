"""Reads DeepSpeed's files of a model: names and shapes, buffers, frozen and tied parameters."""

import math

import torch

from .. import _C
from .restricted_load import load_tensors
from .whole_tensors import VALUE, Stored, WholeTensor, stored


class ModelFiles:
    """The contents of the model's files.

    Attributes:
        shapes: [{name: shape}] of the trained parameters, by param group, or sub-group at stage 3, in the order of the
            flat tensors.
        of_ranks: the content of every file: one, or at stage 3 one for each rank.
    """

    def __init__(self, paths):
        self.of_ranks = [load_tensors(path) for path in paths]
        for path, content in zip(paths, self.of_ranks):
            wanted = {"module", "buffer_names", "param_shapes", "shared_params"}
            if not isinstance(content, dict) or not wanted <= content.keys():
                raise _C.FormatError(f"'{path}' is no file of a model under ZeRO: wanted {', '.join(sorted(wanted))}")
            ways = content.get("mp_world_size")
            if ways not in (None, 1):
                raise _C.FormatError(f"'{path}' is of a model under tensor parallelism (mp_world_size {ways}), which "
                                     "this version does not import; make it whole in DeepSpeed first")
        self.first = self.of_ranks[0]
        shapes = self.first["param_shapes"]
        self.shapes = [dict(group) for group in (shapes if isinstance(shapes, list) else [shapes])]

    def frozen(self):
        """[(name, shape, Stored)] of parameters that no optimizer updates."""
        trained = {name for group in self.shapes for name in group}
        known = trained | set(self.first["buffer_names"]) | set(self.first["shared_params"])
        shapes = self.first.get("frozen_param_shapes") or {}
        result = [(name, shape, self._frozen(name, shape)) for name, shape in shapes.items() if name not in trained]
        # Stage 1 does not list frozen parameters; at stage 3 those in "module" are empty.
        for name, value in self.first["module"].items():
            if name not in known and name not in shapes and (len(self.of_ranks) == 1 or value.numel()):
                result.append((name, value.shape, stored(value)))
        return result

    def _frozen(self, name, shape):
        fragments = [content["frozen_param_fragments"][name].detach() for content in self.of_ranks]
        numel = math.prod(shape)
        if sum(f.numel() for f in fragments) < numel:
            raise _C.FormatError(f"the parts of the frozen '{name}' have fewer elements than its shape {list(shape)}")
        if len(fragments) == 1 and fragments[0].numel() == numel:
            return stored(fragments[0])
        return Stored(fragments[0].dtype, lambda: torch.cat([f.flatten() for f in fragments])[:numel])

    def dtype_of(self, name, otherwise):
        """The dtype in which the model computes with the parameter; ``otherwise`` where the files do not have it."""
        value = self.first["module"].get(name)
        return otherwise if value is None else value.dtype

    def buffers(self):
        """[WholeTensor] of rank 0's buffers, and of other ranks' buffers that differ from these."""
        result = []
        for name in self.first["buffer_names"]:
            value = self.first["module"].get(name)
            if value is None:
                continue
            result.append(WholeTensor(name, value.shape, value.dtype, {VALUE: stored(value)}, "buffer"))
            for rank, content in enumerate(self.of_ranks[1:], 1):
                theirs = content["module"].get(name)
                if theirs is not None and not torch.equal(theirs, value):
                    result.append(WholeTensor(f"{rank}:{name}", theirs.shape, theirs.dtype, {VALUE: stored(theirs)},
                                              "rank buffer"))
        return result

    def aliases(self):
        """{name: [other names of the same parameter]}."""
        own = {name for group in self.shapes for name in group} | set(self.first.get("frozen_param_shapes") or {})
        result = {}
        for name, target in self.first["shared_params"].items():
            if name not in own:
                result.setdefault(target, []).append(name)
        return result
