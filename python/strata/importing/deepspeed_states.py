"""The master weights and the optimizer's states in files of DeepSpeed's ZeRO: flat tensors of every rank, or those of a
universal checkpoint."""

import math
import os
from typing import NamedTuple

import torch

from .. import _C
from ..checkpoint.library_states import Numbers, engine_states
from .whole_tensors import VALUE, Stored, load_tensors, number_of


# --- flat tensors in every rank's file ---

# Every rank has one flat tensor, of one dimension, for each param group, or at stage 3 for each sub-group. The model's
# file lists the parameters of a group in order. At stages 1 and 2 the ranks' tensors are consecutive ranges of the
# group. At stage 3 DeepSpeed cuts each parameter into one equal part for each rank, and a rank's tensor holds its part
# of each parameter. States with one entry for each element have the same layout.

class Run(NamedTuple):
    """Elements [begin, begin + numel) of a parameter lie at ``at`` in the flat tensor ``flat`` of ``rank``."""

    rank: int
    flat: int
    at: int
    begin: int
    numel: int


class FlatLayout:
    """The offsets of parameters in flat tensors. ``shapes``: [{name: shape}] by flat tensor. ``stage`` is of ZeRO.
    ``paddings``: [[elements behind each parameter]] by flat tensor, or None. ``places``: {name: (flat, begin, numel)}:
    the offset in the joined tensors of all ranks, or at stage 3 in each rank's. ``ends``: [end] by flat tensor."""

    def __init__(self, shapes, world_size, stage, paddings=None):
        self.shapes, self.world_size, self.stage = shapes, world_size, stage
        self.places, self.ends, self._whole_parts = {}, [], {}
        for flat, named in enumerate(shapes):
            at = 0
            for i, (name, shape) in enumerate(named.items()):
                self.places[name] = flat, at, math.prod(shape)
                at += self.part(math.prod(shape)) + (paddings[flat][i] if paddings else 0)
            self.ends.append(at)

    def part(self, numel):
        """Elements of a parameter in one flat tensor."""
        return math.ceil(numel / self.world_size) if self.stage == 3 else numel

    def runs_in(self, name, lengths):
        """[``Run``] of a parameter, which together hold each of its elements once. ``lengths``: [elements of the flat
        tensor that has it] by rank."""
        flat, at, numel = self.places[name]
        if self.stage == 3:
            part = self.part(numel)
            return [Run(rank, flat, at, begin, min(part, numel - begin))
                    for rank in range(self.world_size) if (begin := rank * part) < numel]
        result, start = [], 0
        for rank, length in enumerate(lengths):
            low, high = max(at, start), min(at + numel, start + length)
            if low < high:
                result.append(Run(rank, flat, low - start, low - at, high - low))
            start += length
        return result

    def whole_parts(self, flat, lengths):
        """([{name: offset}], [elements]) by rank, for tensors that have all elements of every parameter of which the
        rank's flat tensor has some, one after the other. ``lengths``: [elements of ``flat``] by rank."""
        known = self._whole_parts.get((flat, tuple(lengths)))
        if known is not None:
            return known
        offsets, ends = [{} for _ in lengths], [0] * len(lengths)
        for name in self.shapes[flat]:
            for run in self.runs_in(name, lengths):
                offsets[run.rank][name] = ends[run.rank]
                ends[run.rank] += self.places[name][2]
        self._whole_parts[flat, tuple(lengths)] = offsets, ends
        return offsets, ends


class FlatStates:
    """The contents of every rank's optimizer file. ``stage`` is of ZeRO. ``param_groups``: [dict], the optimizer's, or
    None. ``loss_scaler``: DeepSpeed's, as data, or None."""

    def __init__(self, paths, model):
        self._contents = [_optimizer_content(path) for path in paths]
        first = self._contents[0]
        self.stage = int(first.get("zero_stage", 1))
        self._require_all(paths, first, len(model.of_ranks))
        values, inner = ("fp32_flat_groups", "optimizer_state_dict") if self.stage == 3 else (
            "single_partition_of_fp32_groups", "base_optimizer_state")
        self._values = [self._list(content, values, path) for content, path in zip(self._contents, paths)]
        states = [content.get(inner) or {} for content in self._contents]
        if isinstance(states[0], list):  # elastic checkpoints have no param groups
            states = [{"state": dict(enumerate(s))} for s in states]
        self._states = [s.get("state", {}) for s in states]
        self.param_groups = states[0].get("param_groups")
        self.loss_scaler = first.get("loss_scaler")
        self._paths = paths
        self._by_group, self._by_rank = {}, {}
        self._layout = self._layout_of(model.shapes)

    def _require_all(self, paths, first, models):
        folder, count = os.path.dirname(paths[0]), first.get("partition_count", len(paths))
        count = max(count) if isinstance(count, (list, tuple)) else count
        if first.get("ds_zero_partition_groups"):
            raise _C.FormatError(f"'{paths[0]}' is of a model under expert parallelism, which this version does not "
                                 "import")
        if count != len(paths):
            raise _C.IoError(f"'{folder}' has the optimizer's states of {len(paths)} ranks; wanted {count}: files are "
                             "missing, or are left of another checkpoint")
        if self.stage == 3 and models != len(paths):  # the frozen parameters' parts are in them
            raise _C.IoError(f"'{folder}' has the models of {models} ranks and the optimizer's states of {len(paths)}; "
                             "wanted as many: files are missing")

    @staticmethod
    def _list(content, key, path):
        found = content.get(key)
        if not isinstance(found, list) or not all(isinstance(t, torch.Tensor) for t in found):
            raise _C.FormatError(f"'{path}' has no list of tensors '{key}'; it is no file of an optimizer under ZeRO")
        return [tensor.detach() for tensor in found]

    def _layout_of(self, shapes):
        if any(len(values) != len(shapes) for values in self._values):
            raise _C.FormatError(f"'{self._paths[0]}' has {len(self._values[0])} param groups, the model's file "
                                 f"{len(shapes)}; they are of different checkpoints")
        paddings = self._contents[0].get("param_alignment_paddings") if self.stage < 3 else None
        layout = FlatLayout(shapes, len(self._values), self.stage, paddings)
        for group, end in enumerate(layout.ends):
            lengths = [values[group].numel() for values in self._values]
            if end > (min(lengths) if self.stage == 3 else sum(lengths)):
                raise _C.FormatError(f"the flat tensors of param group {group} in '{os.path.dirname(self._paths[0])}' "
                                     f"have {lengths} elements, too few for the parameters that the model's file lists")
        return layout

    def kinds_of(self, name, shape, values_only=False):
        """{kind: Stored} of a parameter."""
        group, _, _ = self._layout.places[name]
        flats_of = {VALUE: ([values[group] for values in self._values], None)}
        if not values_only:
            flats_of |= self._by_element(group)
        return {kind: self._stored(name, *flats) for kind, flats in flats_of.items()}

    def _by_element(self, group):
        """{kind: ([tensor of each rank, or None], None or [{name: offset}] by rank)}: states with an entry for each
        element: flat tensors, or, as DeepSpeed's Muon has them at stages 1 and 2, with all elements of every parameter
        of which the rank's flat tensor has some. FormatError for states of another size."""
        if group not in self._by_group:
            self._by_group[group] = self._find_by_element(group)
        return self._by_group[group]

    def _find_by_element(self, group):
        ranks, found = range(len(self._values)), {}
        lengths = [values[group].numel() for values in self._values]
        for kind in dict.fromkeys(kind for rank in ranks for kind in self._state(rank, group)):
            flats = [self._state(rank, group).get(kind) for rank in ranks]
            sizes = [flat.numel() if _is_by_element(flat) else 0 for flat in flats]
            if max(sizes) == 0:
                continue
            offsets, ends = self._layout.whole_parts(group, lengths) if self.stage < 3 else (None, None)
            if sizes == ends and sizes != lengths:
                found[kind] = flats, offsets
            elif sizes == lengths or min(sizes) == max(sizes) >= max(lengths):  # without padding, or with it
                found[kind] = flats, None
            elif max(sizes) > 1:
                whole = "" if ends is None else f", or {ends} for whole parameters"
                raise _C.FormatError(
                    f"the state '{kind}' of param group {group} in '{os.path.dirname(self._paths[0])}' has {sizes} "
                    f"elements on the ranks, and is not imported; wanted one for each element, {lengths}{whole}. Begin "
                    "with the weights alone: strata.utils.zero_to_fp32 makes a state dict of them")
        return found

    def scalars_of(self, name):
        """{key: number}: the optimizer's states of a parameter that have one element."""
        group, _, _ = self._layout.places[name]
        by_element = self._by_element(group)
        return {key: number_of(value) for key, value in self._state(0, group).items()
                if key not in by_element and not (isinstance(value, torch.Tensor) and value.numel() != 1)}

    def _state(self, rank, group):
        if (rank, group) not in self._by_rank:
            owners = [(i, g) for g in self.param_groups or [] for i in g.get("params", [])]
            key, of_group = owners[group] if group < len(owners) else (group, {})
            called = f"param group {group} in '{self._paths[rank]}'"
            self._by_rank[rank, group] = engine_states(self._states[rank].get(key, {}), of_group, called)
        return self._by_rank[rank, group]

    def _stored(self, name, flats, offsets):
        group, _, _ = self._layout.places[name]
        dtype = next(flat.dtype for flat in flats if flat is not None)

        def read():
            pieces = []
            for run in self._layout.runs_in(name, [values[group].numel() for values in self._values]):
                begin = offsets[run.rank][name] + run.begin if offsets else run.at
                pieces.append(_part(flats[run.rank], begin, begin + run.numel))
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, dtype=dtype)])

        return Stored(dtype, read)


def _is_by_element(state):
    return isinstance(state, (torch.Tensor, Numbers)) and state.dim() > 0


def _part(state, first, last):
    return state.part(first, last) if isinstance(state, Numbers) else state.flatten()[first:last]


def _optimizer_content(path):
    content = load_tensors(path)
    inner = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(inner, dict):
        raise _C.FormatError(f"'{path}' is no file of an optimizer under ZeRO: it lacks 'optimizer_state_dict'")
    return inner


# --- universal checkpoints: a folder for each parameter, with a file for each of its states ---

class UniversalStates:
    """The states of all parameters, read one at a time. Attributes as of ``FlatStates``."""

    def __init__(self, folder):
        self._folder = folder
        path = os.path.join(folder, "optimizer_state.pt")
        content = load_tensors(path) if os.path.exists(path) else {}
        inner = content.get("optimizer_state_dict", content.get("base_optimizer_state")) or {}
        self.stage = int(content.get("zero_stage", 1))
        self.param_groups = content.get("param_groups", inner.get("param_groups"))
        self.loss_scaler = content.get("loss_scaler")
        self._step = max((number_of(state["step"]) for state in inner.get("state", {}).values() if "step" in state),
                         default=None)

    def kinds_of(self, name, shape, values_only=False):
        """{kind: Stored} of a parameter."""
        folder = self._folder_of(name)
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = [name for name in names if name.endswith(".pt") and name != "step.pt"]
        if "fp32.pt" not in files:
            raise _C.IoError(f"'{folder}' has no 'fp32.pt': the checkpoint lacks the values of '{name}'")
        kinds = {VALUE: None}
        for file in ["fp32.pt"] if values_only else files:
            path = os.path.join(folder, file)
            found = self._tensor(path)
            if found.numel() != math.prod(shape):
                raise _C.FormatError(f"'{path}' has {found.numel()} elements; wanted {math.prod(shape)} of shape "
                                     f"{list(shape)}")
            kind = VALUE if file == "fp32.pt" else file.removesuffix(".pt")
            kinds[kind] = Stored(found.dtype, lambda path=path: self._tensor(path))
        return kinds

    def scalars_of(self, name):
        """{"step": number} where it is known."""
        path = os.path.join(self._folder_of(name), "step.pt")
        if os.path.exists(path):
            return {"step": number_of(load_tensors(path))}
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
