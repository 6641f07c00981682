"""Training that FSDP2 saved with torch.distributed.checkpoint goes on under Strata with the same bits."""

import io
import os
import pickle
import shutil

import numpy
import pytest
import strata
import torch
from devices import ON_GPU
from ranks import run_ranks
from strata.importing.__main__ import main as command_line
from strata.importing.dcp import _overlap, import_dcp
from tiny_models import rank_and_world

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="FSDP2 over gloo on the CPU"),
    pytest.mark.xdist_group("import_dcp"),  # tests of this file share FSDP2's checkpoint
]
STEPS = 3


class Model(torch.nn.Module):
    """Frozen, tied and odd-sized parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.frozen = torch.nn.Linear(8, 7)
        self.frozen.requires_grad_(False)
        self.back = torch.nn.Linear(7, 8)
        self.norm = torch.nn.BatchNorm1d(8, affine=False)
        self.register_buffer("factor", torch.full((8,), 1.5))
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.back(self.frozen(self.embedding(tokens))).tanh()) * self.factor)


def _loss(model, step, rank):
    tokens = torch.randint(0, 13, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1))


def _optimizer(model):
    named = dict(model.named_parameters())
    groups = [{"params": [named["embedding.weight"]], "lr": 2e-2},
              {"params": [named["back.weight"], named["back.bias"]], "lr": 1e-2, "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def _fsdp(folder):
    """Whole weights and moments at the checkpoint, on rank 0, and this rank's losses after it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    rank, _ = rank_and_world()
    torch.manual_seed(1)
    model = Model()
    fully_shard(model.back)
    fully_shard(model)
    optimizer = _optimizer(model)

    def steps(numbers):
        losses = []
        for step in numbers:
            loss = _loss(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(range(STEPS))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "epoch": 5, "more": {"seed": torch.arange(4)}},
             checkpoint_id=f"{folder}/whole")  # fmt: skip
    dcp.save({"app": {"model": get_model_state_dict(model)}}, checkpoint_id=f"{folder}/weights")
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/alone")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found = {("value", name): value.numpy().copy() for name, value in weights.items()}
    for name, state in states.get("state", {}).items():
        found.update({(kind, name): value.numpy().copy() for kind, value in state.items() if kind != "step"})
    return found, steps(range(STEPS, 2 * STEPS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, each rank's answer)."""
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_ranks(2, _fsdp, str(folder))


def _strata(folder, stages):
    rank, _ = rank_and_world()
    told = []
    for stage in stages:
        torch.manual_seed(2)
        model = Model()
        config = {"train_micro_batch_size_per_gpu": 6, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
        engine = strata.initialize(model=model, optimizer=_optimizer(model), config=config)[0]
        with torch.no_grad():
            model.factor.zero_()
        _, client_state = engine.load_checkpoint(folder)
        assert client_state["epoch"] == 5 and client_state["more"]["seed"].tolist() == [0, 1, 2, 3]
        assert engine.get_lr() == [2e-2, 1e-2] and engine.optimizer.param_groups[1]["weight_decay"] == 0.0
        found = {("value", name): value.cpu().numpy() for name, value in engine.module_state_dict().items()}
        for name, parameter in model.named_parameters():
            for kind in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
                found[kind, name] = strata.utils.safe_get_full_optimizer_state(parameter, kind).cpu().numpy()
        found = {key: value.copy() for key, value in found.items()}
        losses = []
        for step in range(STEPS, 2 * STEPS):
            loss = _loss(engine, step, rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        told.append((found, losses))
        engine.destroy()
    return told


def test_fsdp2s_weights_and_moments_are_the_same_bits(saved, tmp_path):
    path = import_dcp(saved[0] / "whole", tmp_path, buffers=["factor"])
    assert path == str(tmp_path / "whole")
    expected = saved[1][0][0]
    assert {n for kind, n in expected if kind == "exp_avg"} == {"embedding.weight", "back.weight", "back.bias"}
    for (_, their_losses), told in zip(saved[1], run_ranks(2, _strata, str(tmp_path), (1, 3))):
        for found, losses in told:
            for key, value in expected.items():
                if "running" not in key[1]:  # each rank has its own; torch keeps those of any
                    assert value.shape == found[key].shape and numpy.array_equal(value, found[key]), key
            assert losses == pytest.approx(their_losses, rel=1e-6)


@pytest.mark.parametrize("name", ["weights", "alone"])
def test_a_model_without_its_optimizer(saved, name, tmp_path, capsys):
    arguments = ["dcp", str(saved[0] / name), str(tmp_path / "out"), "--tag", "t", "--buffer", "factor"]
    assert command_line(arguments) == 0 and capsys.readouterr().out.strip() == str(tmp_path / "out" / "t")
    checkpoint = strata._C.TrainingCheckpoint(str(tmp_path / "out" / "t"))
    assert {n for role, n, *_ in checkpoint.tensors() if role == "buffer"} == {
        "factor", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}  # fmt: skip
    value = checkpoint.read("parameter", "back.weight").numpy()
    assert numpy.array_equal(value, saved[1][0][0]["value", "back.weight"]) and checkpoint.kinds == ["value"]


def _told(folder, out):
    with pytest.raises(strata.Error) as error:
        import_dcp(folder, out)
    return f"{type(error.value).__name__}: {error.value}"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_what_is_no_such_folder_is_refused(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def copy(name):
        return shutil.copytree(saved[0] / "whole", tmp_path / name)

    assert "wanted a file '.metadata'" in _told(tmp_path, out)
    folder = copy("missing")
    (folder / "__1_0.distcp").unlink()
    assert _told(folder, out).startswith("IoError") and "__1_0.distcp" in _told(folder, out)
    folder = copy("cut")
    os.truncate(folder / "__1_0.distcp", 1000)
    assert "is cut off" in _told(folder, out)
    folder = copy("damaged")
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:200])
    assert "cut off, or not as torch writes it" in _told(folder, out)
    folder = copy("evil")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "posix.mkdir" in _told(folder, out)
    metadata = pickle.loads((saved[0] / "whole" / ".metadata").read_bytes())
    content = io.BytesIO()
    torch.save(Evil(), content)
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "__0_0.distcp", 0, len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "holds more than data" in _told(folder, out) and not os.path.exists("ran")
    for info in metadata.storage_data.values():
        info.relative_path = "../whole/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "outside of the folder" in _told(folder, out)
    assert not out.exists() or os.listdir(out) in ([], [".strata.lock"])


def _overlapping(folder, key, change):
    """Changes where pieces of ``key`` lie: two of equal sizes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    chunks = metadata.state_dict_metadata[key].chunks
    by_offsets = {index.offset: info for index, info in metadata.storage_data.items() if index.fqn == key}
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        del metadata.storage_data[index]
    entry = metadata.state_dict_metadata[key]
    entry.chunks, places = change(chunks)
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for chunk, (offsets, _) in zip(entry.chunks, places):
        metadata.storage_data[MetadataIndex(key, chunk.offsets)] = by_offsets[offsets]
    path.write_bytes(pickle.dumps(metadata))


def test_pieces_must_cover_a_tensor_and_not_overlap(saved, tmp_path):
    """The sum of the pieces' sizes does not prove that they cover the tensor: two may overlap and leave a gap."""
    import dataclasses

    folder = shutil.copytree(saved[0] / "whole", tmp_path / "overlapping")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "model.back.weight"
    first, second = metadata.state_dict_metadata[key].chunks
    assert first.sizes == second.sizes == torch.Size([4, 7])
    moved = dataclasses.replace(second, offsets=torch.Size([2, 0]))
    found = [tuple(first.offsets), tuple(second.offsets)]
    _overlapping(folder, key, lambda _: ([first, moved], [(torch.Size(o), None) for o in found]))
    told = _told(folder, tmp_path / "out")
    assert told.startswith("FormatError") and "overlap" in told and "'model.back.weight'" in told, told
    assert "[2, 0]" in told and "[8, 7]" in told
    folder = shutil.copytree(saved[0] / "whole", tmp_path / "gap")
    _overlapping(folder, key, lambda _: ([first], [(torch.Size(found[0]), None)]))
    assert "do not make up its shape [8, 7]" in _told(folder, tmp_path / "out")


def test_boxes_that_overlap_are_found_in_any_number_of_dimensions():
    rows = [([begin, 0], [3, 5]) for begin in range(0, 3000, 3)]
    assert _overlap(rows) is None and _overlap([([], [])]) is None
    assert _overlap(rows + [([4, 4], [1, 1])]) is not None and _overlap([([], []), ([], [])]) is not None
    corners = [([i, j, 0], [2, 2, 4]) for i in (0, 2) for j in (0, 2)]
    assert _overlap(corners + [([1, 1, 1], [0, 2, 2])]) is None  # an empty one meets none
    assert _overlap([*corners[:3], ([1, 2, 3], [2, 2, 1])]) == (([0, 2, 0], [2, 2, 4]), ([1, 2, 3], [2, 2, 1]))
