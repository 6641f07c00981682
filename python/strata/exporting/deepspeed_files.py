"""The files of one checkpoint of DeepSpeed's ZeRO, as version 0.19.8 writes them: their contents, the offset of each
element of the trained parameters in the flat tensors of each rank, and pickles of DeepSpeed's classes."""

import collections
import math
import os
import pickle
import shutil
import types
from dataclasses import dataclass

import torch
from tqdm import tqdm

from ..importing.whole_tensors import VALUE


# --- ``torch.save`` for values whose classes are DeepSpeed's ---

# DeepSpeed's files hold a few objects of its own classes. A pickle has only the module and the name of a class, so a
# process without the library can write such objects.


class ForeignClass:
    """A class of another library.

    Args:
        module, name: str, by which the reader of the file imports the class.
    """

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, **attributes):
        """An object of the class, without a call of its constructor; ``attributes`` become its ``__dict__``."""
        return ForeignObject(self, attributes)


class ForeignObject:
    """An object of a ``ForeignClass``."""

    def __init__(self, cls, attributes):
        self.cls, self.attributes = cls, attributes


class _Pickler(pickle._Pickler):
    """The pickler of the standard library that is written in Python: its C twin refuses names that it cannot import."""

    def save(self, value, *arguments, **options):
        if not isinstance(value, (ForeignClass, ForeignObject)):
            super().save(value, *arguments, **options)
        elif id(value) in self.memo:
            self.write(self.get(self.memo[id(value)][0]))
        elif isinstance(value, ForeignClass):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            self.memoize(value)
        else:
            self.save(value.cls)
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
            self.memoize(value)
            self.save(value.attributes)
            self.write(pickle.BUILD)


_PICKLE = types.SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")


def save(value, path):
    """Writes ``value`` to the file ``path`` as ``torch.save`` does; parts of it may be ``ForeignObject``s."""
    torch.save(value, path, pickle_module=_PICKLE)


# --- offsets ---

# At stages 1 and 2 each param group is one flat tensor, padded to a multiple of twice the number of ranks, and each
# rank has an equal range of it. At stage 3 each parameter is cut into as many equal parts as there are ranks, and a
# rank's flat tensor of a sub-group holds its parts. A param group has several sub-groups where its part exceeds
# ``sub_group_size`` elements.


@dataclass
class Run:
    """Elements [begin, begin + numel) of a parameter lie at ``at`` in the flat tensor ``flat`` of ``rank``."""

    rank: int
    flat: int
    at: int
    begin: int
    numel: int


class Layout:
    """The offsets of all trained parameters.

    Args:
        groups: [{name: shape}], by param group, in the optimizer's order. Parameters without elements are left out.
        world_size: number of ranks that DeepSpeed will train on.
        stage: of ZeRO, 1 to 3.
        sub_group_size: elements of a rank, of the configuration; counts at stage 3.

    Attributes:
        shapes: [{name: shape}] by flat tensor.
        numel: [elements of each flat tensor of one rank].
        group_flats: [[flat tensors]] by param group.
        paddings: [[elements at the end of each rank's flat tensor that belong to no parameter]] by rank, at stages 1
            and 2.
    """

    def __init__(self, groups, world_size, stage, sub_group_size):
        self.world_size, self.stage = world_size, stage
        self.shapes, self.group_flats = [], []
        for group in groups:
            members = [group] if stage < 3 else self._sub_groups(group, sub_group_size)
            self.group_flats.append(list(range(len(self.shapes), len(self.shapes) + len(members))))
            self.shapes += members
        self.numel = [self._numel_of(shapes) for shapes in self.shapes]
        self._places = {}
        for flat, shapes in enumerate(self.shapes):
            at = 0
            for name, shape in shapes.items():
                self._places[name] = (flat, at, math.prod(shape))
                at += self._step(math.prod(shape))
        self.paddings = [[self._padding(flat, rank) for flat in range(len(self.shapes))] for rank in range(world_size)]

    def _step(self, numel):
        """Elements from the offset of one parameter to that of the next."""
        return math.ceil(numel / self.world_size) if self.stage == 3 else numel

    def _sub_groups(self, group, size):
        parts = {name: self._step(math.prod(shape)) for name, shape in group.items()}
        if size >= sum(parts.values()):
            return [group]
        result, members, held = [], {}, 0
        for name, shape in group.items():
            members[name] = shape
            held += parts[name]
            if held >= size:
                result.append(members)
                members, held = {}, 0
        return result + [members] if members else result

    def _numel_of(self, shapes):
        own = sum(self._step(math.prod(shape)) for shape in shapes.values())
        if self.stage == 3:
            return own
        alignment = 2 * self.world_size
        return math.ceil(own / alignment) * alignment // self.world_size

    def _padding(self, flat, rank):
        whole = sum(math.prod(shape) for shape in self.shapes[flat].values())
        return min(max(self.numel[flat] * (rank + 1) - whole, 0), self.numel[flat])

    def runs_of(self, name):
        """[``Run``] of a parameter, which together hold each of its elements once."""
        flat, at, numel = self._places[name]
        if self.stage == 3:
            part = self._step(numel)
            return [Run(rank, flat, at, begin, min(part, numel - begin))
                    for rank in range(self.world_size) if (begin := rank * part) < numel]
        size, result = self.numel[flat], []
        for rank in range(at // size, self.world_size):
            low, high = max(at, rank * size), min(at + numel, (rank + 1) * size)
            if low >= high:
                break
            result.append(Run(rank, flat, low - rank * size, low - at, high - low))
        return result

    def fragments(self, rank):
        """[{name: (numel, start)}] by flat tensor: the parameters' elements in the rank's flat tensors."""
        result = [{} for _ in self.shapes]
        for name in self._places:
            for run in self.runs_of(name):
                if run.rank == rank:
                    result[run.flat][name] = (run.numel, run.at)
        return result


# --- the files ---

_VERSION = "0.19.8"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_fragment_address = ForeignClass("deepspeed.utils.tensor_fragment", "fragment_address")


class Files:
    """Writes them from the contents that ``strata.exporting.deepspeed`` has read.

    Flat tensors lie in temporary files while this class fills them, since parts of each tensor of the model go to many
    of them.
    """

    def __init__(self, contents):
        self._contents, self._layout = contents, contents.layout

    def write(self, folder):
        """Writes all files into ``folder``, which exists and is empty."""
        work = os.path.join(folder, "work")
        os.mkdir(work)
        flats = self._flats(work)
        module, frozen = self._fill(flats, work)
        self._write_model(folder, module, frozen)
        for rank in range(self._layout.world_size):
            save({"optimizer_state_dict": self._optimizer(flats, rank), "ds_config": self._contents.config,
                  "ds_version": _VERSION}, os.path.join(folder, self._optimizer_name(rank)))
        del flats, module, frozen
        shutil.rmtree(work)

    # --- tensors ---

    def _flats(self, work):
        """{kind: [[tensor on disk, by flat tensor] by rank]}, filled with zeros."""
        kinds = {}
        for tensor in self._contents.trained.values():
            kinds.update((kind, stored.dtype) for kind, stored in tensor.kinds.items())
        kinds[VALUE] = torch.float32
        return {
            kind: [[_on_disk(os.path.join(work, f"{i}-{rank}-{flat}"), numel, dtype)
                    for flat, numel in enumerate(self._layout.numel)] for rank in range(self._layout.world_size)]
            for i, (kind, dtype) in enumerate(kinds.items())
        }  # fmt: skip

    def _fill(self, flats, work):
        """({name: tensor of the module's state dict}, {name: frozen tensor}), after it has filled ``flats``."""
        module, frozen = {}, {}
        whole_module = self._layout.stage < 3
        tensors = [t for t in self._contents.tensors if t.role == "parameter"]
        for number, tensor in enumerate(tqdm(tensors, desc="reading", unit="tensor", delay=1, disable=None)):
            trained = tensor.name in self._contents.trained
            value = tensor.kinds[VALUE].read().reshape(tensor.shape)
            for kind, stored in tensor.kinds.items() if trained else ():
                elements = (value if kind == VALUE else stored.read()).flatten()
                for run in self._layout.runs_of(tensor.name):
                    target = flats[kind][run.rank][run.flat]
                    target[run.at:run.at + run.numel].copy_(elements[run.begin:run.begin + run.numel])
            if whole_module or not trained:
                kept = _on_disk(os.path.join(work, f"module-{number}"), value.numel(), tensor.dtype).view(tensor.shape)
                kept.copy_(value)
                if not trained:
                    frozen[tensor.name] = kept
                if whole_module:
                    module.update(dict.fromkeys([tensor.name, *tensor.aliases], kept))
            if not whole_module:
                module.update((name, torch.empty(0, dtype=tensor.dtype)) for name in (tensor.name, *tensor.aliases))
        return module, frozen

    # --- the model's files ---

    def _write_model(self, folder, module, frozen):
        if self._layout.stage < 3:
            save(self._model(0, module, frozen), os.path.join(folder, "mp_rank_00_model_states.pt"))
            return
        for rank in range(self._layout.world_size):
            fragments = {name: self._fragment(value, rank) for name, value in frozen.items()}
            state = self._model(rank, module, frozen, fragments)
            save(state, os.path.join(folder, f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))

    def _fragment(self, value, rank):
        """The rank's part of a frozen parameter; all ranks' parts have the same size."""
        part = math.ceil(value.numel() / self._layout.world_size)
        own = value.flatten()[rank * part:(rank + 1) * part]
        return torch.cat([own, own.new_zeros(part - own.numel())])

    def _model(self, rank, module, frozen, fragments=None):
        contents, layout = self._contents, self._layout
        buffers = self._buffers(rank)
        ordered = collections.OrderedDict
        listed = layout.stage > 1  # stage 1 does not list frozen parameters apart
        shared = {alias: t.name for t in contents.tensors if t.role == "parameter" for alias in t.aliases}
        steps = int(contents.training.get("global_steps") or 0)
        return {
            "module": ordered({**module, **buffers}),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [ordered((n, torch.Size(s)) for n, s in shapes.items()) for shapes in layout.shapes],
            "frozen_param_shapes": ordered((n, v.shape) for n, v in frozen.items()) if listed else None,
            "shared_params": shared if rank == 0 else {},
            "frozen_param_fragments": ordered(frozen if fragments is None else fragments) if listed else None,
            "lr_scheduler": contents.scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": int(contents.training.get("skipped_steps") or 0),
            "global_steps": steps,
            "global_samples": steps * contents.number("", "train_batch_size", 0),
            "dp_world_size": layout.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": contents.config,
            "ds_version": _VERSION,
            **contents.client_state,
        }

    def _buffers(self, rank):
        """{name: tensor}: rank 0's, or the rank's own where the same number of ranks saved it."""
        buffers = {t.name: t for t in self._contents.tensors if t.role == "buffer"}
        if self._contents.saved_world_size == self._layout.world_size:
            prefix = f"{rank}:"
            buffers.update((t.name.removeprefix(prefix), t) for t in self._contents.tensors
                           if t.role == "rank buffer" and t.name.startswith(prefix))
        return {name: t.kinds[VALUE].read().reshape(t.shape).clone() for name, t in buffers.items()}

    # --- the optimizer's files ---

    def _optimizer_name(self, rank):
        enabled = any(self._contents.config.get(name, {}).get("enabled") is True for name in ("bf16", "bfloat16"))
        return f"{'bf16_' if enabled else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _optimizer(self, flats, rank):
        layout, contents = self._layout, self._contents
        masters = flats[VALUE][rank]
        scaler = self._loss_scaler()
        state = {"loss_scaler": scaler, "dynamic_loss_scale": self._dynamic(), "overflow": False}
        if layout.stage == 3:
            return {**state, "zero_stage": 3, "partition_count": layout.world_size,
                    "optimizer_state_dict": self._torch_state(flats, rank), "fp32_flat_groups": masters}  # fmt: skip
        return {
            **state,
            "clip_grad": contents.number("", "gradient_clipping", 0.0),
            "base_optimizer_state": self._torch_state(flats, rank),
            "single_partition_of_fp32_groups": masters,
            "zero_stage": layout.stage,
            "group_paddings": layout.paddings[rank],
            "param_alignment_paddings": [[0] * len(shapes) for shapes in layout.shapes],
            "partition_count": [layout.world_size] * len(layout.shapes),
            "ds_version": _VERSION,
            "param_slice_mappings": [
                collections.OrderedDict((name, _fragment_address(numel=numel, start=start))
                                        for name, (numel, start) in fragments.items())
                for fragments in layout.fragments(rank)
            ],
        }  # fmt: skip

    def _torch_state(self, flats, rank):
        """The result of ``state_dict()`` of the optimizer of ``rank``."""
        layout, contents = self._layout, self._contents
        state = {}
        for flat, shapes in enumerate(layout.shapes):
            first = next(iter(shapes))
            kinds = contents.trained[first].kinds
            values = dict(contents.scalars[first])  # torch's optimizers accept a step that is an int, too
            values.update((kind, flats[kind][rank][flat]) for kind in kinds if kind != VALUE)
            if len(values) > 1 or "step" not in values:
                state[flat] = values
        groups = []
        for group, own in zip(contents.param_groups, layout.group_flats):
            groups.append({**group, "params": own})
            step = state.get(own[0], {}).get("step")
            if isinstance(step, int):
                groups[-1]["step"] = step  # FusedAdam of older versions counts here
        return {"state": state, "param_groups": groups}

    def _dynamic(self):
        return self._half() and not self._contents.number("fp16", "loss_scale", 0)

    def _half(self):
        return self._contents.config.get("fp16", {}).get("enabled") is True

    def _loss_scaler(self):
        contents = self._contents
        scale = float(contents.training.get("loss_scale") or 1.0)
        if not self._dynamic():
            return ForeignClass(_SCALERS, "LossScaler")(cur_scale=scale if self._half() else 1.0, dynamic=False)
        saved = contents.training.get("loss_scaler") or {}
        hysteresis = int(contents.number("fp16", "hysteresis", 2))
        return ForeignClass(_SCALERS, "DynamicLossScaler")(
            cur_scale=scale, dynamic=True, cur_iter=int(saved.get("iteration", 0)),
            last_overflow_iter=int(saved.get("last_overflow", -1)), scale_factor=2.0,
            scale_window=int(contents.number("fp16", "loss_scale_window", 1000)),
            min_scale=contents.number("fp16", "min_loss_scale", 1), delayed_shift=hysteresis,
            cur_hysteresis=int(saved.get("hysteresis_left", hysteresis)),
            consecutive_hysteresis=contents.config.get("fp16", {}).get("consecutive_hysteresis") is True,
            raise_error_at_min_scale=True, dtype=torch.half,
        )  # fmt: skip


def _on_disk(path, numel, dtype):
    """A tensor of zeros whose memory is a file, so that the system may write its pages to disk."""
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    with open(path, "wb") as file:
        file.truncate(numel * dtype.itemsize)
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)
