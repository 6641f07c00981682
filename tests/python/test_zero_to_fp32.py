"""Whole fp32 weights of a checkpoint, under DeepSpeed's names and by the script beside it."""

import json
import os
import resource
import signal
import subprocess
import sys

import numpy
import pytest
import strata
import torch
from ranks import run_ranks
from strata.utils import zero_to_fp32
from tiny_models import rank_and_world

pytestmark = pytest.mark.xdist_group("zero_to_fp32")  # which share the checkpoints


class Model(torch.nn.Module):
    """Frozen and tied parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embedding(tokens))))


def _save(folder):
    """Returns rank 0's values, as numpy arrays, by name."""
    rank, _ = rank_and_world()
    torch.manual_seed(0)
    model = Model().bfloat16()
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}  # fmt: skip
    engine = strata.initialize(model=model, config=config)[0]
    for step in range(3):
        tokens = (torch.arange(6, device=engine.device) * (step + 2) + rank) % 13
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
        engine.save_checkpoint(folder)
    weights = {name: value.float().cpu().numpy() for name, value in engine.module_state_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            weights[name] = strata.utils.safe_get_full_fp32_param(parameter).cpu().numpy()
    engine.destroy()
    return weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of checkpoints, {name: array} of the last)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(2, _save, str(folder))[0]


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert numpy.array_equal(value.float().numpy(), expected[name]), name


def test_a_state_dict_of_masters_frozen_parameters_and_buffers(saved):
    folder, expected = saved
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    _assert_same(found, expected)
    assert found["embedding.weight"].dtype == found["norm.running_mean"].dtype == torch.float32
    assert found["frozen.weight"].dtype == torch.bfloat16 and found["norm.num_batches_tracked"].item() == 3
    assert found["head.weight"] is found["embedding.weight"]
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True, lazy_mode=True)
    assert set(lazy) == {name for name in expected if not name.startswith("frozen")}
    assert lazy["embedding.weight"].shape == (13, 8) and not isinstance(lazy["embedding.weight"], torch.Tensor)
    assert torch.equal(lazy["embedding.weight"].contiguous(), found["embedding.weight"])
    earlier = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step1")
    assert not torch.equal(earlier["embedding.weight"], found["embedding.weight"])
    by_tag = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder / "global_step3")
    assert torch.equal(by_tag["embedding.weight"], found["embedding.weight"])


def test_a_model_takes_them(saved):
    folder, expected = saved
    model = Model()
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(model, folder) is model
    _assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("most", ["500B", None])
def test_files_that_others_read(saved, safe, most, tmp_path):
    from safetensors.torch import load_file

    folder, expected = saved
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", most, safe_serialization=safe)
    name = "model.safetensors" if safe else "pytorch_model.bin"
    read = load_file if safe else lambda path: torch.load(path, weights_only=True)
    files = [name]
    if most is not None:
        index = json.loads((tmp_path / "out" / f"{name}.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert len(files) > 1 and all(list(read(tmp_path / "out" / file)) for file in files)
        assert index["weight_map"].keys() == expected.keys()
        assert all(entry in read(tmp_path / "out" / file) for entry, file in index["weight_map"].items())
    assert sorted(os.listdir(tmp_path / "out")) == sorted(files + ([f"{name}.index.json"] if most else []))
    found = {}
    for file in files:
        found.update(read(tmp_path / "out" / file))
    _assert_same(found, expected)
    assert {v.dtype for v in found.values()} == {torch.float32, torch.int64}
    if not safe and most is None:  # no more than its content, and tied weights once
        assert (tmp_path / "out" / name).stat().st_size < 8000


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_replaces_the_earlier_one_whole_or_not_at_all(saved, tmp_path):
    folder, expected = saved
    out = tmp_path / "out"

    def export(tag, most, safe=False):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, out, most, safe_serialization=safe, tag=tag)
        return _contents(out)

    earlier = export("global_step1", "500B")
    (out / "mine.bin").write_text("stays")
    earlier = _contents(out)
    largest = max(path.stat().st_size for path in out.glob("pytorch_model-*.bin"))
    first, = out.glob("pytorch_model-00001-of-*.bin")
    assert first.stat().st_size < largest  # the disk is full within the save
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, limit[1]))
    try:
        with pytest.raises(strata.IoError, match="cannot write .*pytorch_model-"):
            export("global_step3", "500B")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert _contents(out) == earlier
    later = export("global_step3", "500B")
    assert later.keys() == earlier.keys() and later != earlier
    assert export("global_step3", None).keys() == {"pytorch_model.bin", "mine.bin"}
    assert "pytorch_model.bin" not in export("global_step3", "500B")  # which readers take before an index
    assert export("global_step1", None, safe=True).keys() == {"model.safetensors", "mine.bin"}
    assert export("global_step3", "500B", safe=True).keys() >= {"model.safetensors.index.json", "mine.bin"}
    assert export("global_step3", None).keys() == {"pytorch_model.bin", "mine.bin"}
    _assert_same(torch.load(out / "pytorch_model.bin", weights_only=True), expected)


def test_the_script_beside_the_checkpoints(saved, tmp_path):
    folder, expected = saved
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    arguments = [".", str(tmp_path / "out"), "--safe_serialization", "-t", "global_step3"]
    done = subprocess.run([sys.executable, "zero_to_fp32.py", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from safetensors.torch import load_file

    _assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_what_cannot_be_read_is_said(saved, tmp_path, capsys):
    assert zero_to_fp32.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert zero_to_fp32.main([str(saved[0]), str(tmp_path / "out"), "-t", "global_step7"]) == 1
    assert "global_step7" in capsys.readouterr().err
    assert zero_to_fp32.main([str(saved[0]), str(tmp_path / "out"), "--max_shard_size", "much"]) == 1
    assert "'much'" in capsys.readouterr().err
