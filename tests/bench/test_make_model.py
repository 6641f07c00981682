"""The checkpoints that the benchmarks run on: loaded by transformers, with the true sizes, the same in every form."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from make_model import lay_out, make_config, split_into_files, tensors_of, write_checkpoint  # noqa: E402


def load(folder):
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(said.values()), said
    return model


def same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layers, fused, unfused, size", [(16, 179, 6291, 21.2e9), (48, 531, 18867, 61.1e9)])
def test_the_mixture_of_experts_has_its_published_sizes(layers, fused, unfused, size):
    config = make_config("qwen3-30b-a3b", layers)
    for tensors, count in ((tensors_of(config), fused), (tensors_of(config, unfused=True), unfused)):
        assert len(tensors) == count
        assert 2 * sum(math.prod(t.shape) for t in tensors) == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize("name, size", [("qwen3-8b", 16.4e9), ("qwen3-0.6b", 1.19e9)])
def test_the_dense_models_have_their_published_sizes(name, size):
    assert 2 * sum(math.prod(t.shape) for t in tensors_of(make_config(name))) == pytest.approx(size, rel=5e-3)


def test_fused_and_unfused_experts_load_to_the_same_model(tmp_path):
    config = make_config("tiny-moe")
    write_checkpoint(config, tmp_path / "fused", device="cpu")
    write_checkpoint(config, tmp_path / "unfused", unfused=True, device="cpu")
    assert same_weights(load(tmp_path / "fused"), load(tmp_path / "unfused"))


@pytest.mark.parametrize("name", ["tiny", "tiny-tied", "tiny-moe"])
def test_weights_are_normal_and_norms_are_one(tmp_path, name):
    write_checkpoint(make_config(name, layers=3), tmp_path, device="cpu")
    model = load(tmp_path)
    assert model.dtype == torch.bfloat16 and len(model.model.layers) == 3
    matrices = torch.cat([p.flatten() for n, p in model.named_parameters() if not n.endswith("norm.weight")])
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith("norm.weight"))
    assert matrices.float().std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(matrices.float().mean().item()) < 2e-4
    ids = torch.arange(24).reshape(2, 12)
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(math.log(256), rel=0.05)


def test_values_depend_on_the_seed_but_on_no_other_setting(tmp_path):
    config = make_config("tiny-moe")
    write_checkpoint(config, tmp_path / "one", device="cpu", threads=1)
    write_checkpoint(config, tmp_path / "many", device="cpu", threads=3, file_bytes=70_000)
    write_checkpoint(config, tmp_path / "other", device="cpu", seed=1)
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert same_weights(load(tmp_path / "one"), load(tmp_path / "many"))
    assert not same_weights(load(tmp_path / "one"), load(tmp_path / "other"))


def test_files_keep_their_size_and_the_index_names_every_tensor_once(tmp_path):
    count, size = write_checkpoint(make_config("tiny"), tmp_path, device="cpu", file_bytes=50_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(index["weight_map"]) == count and index["metadata"]["total_size"] == size
    assert set(index["weight_map"].values()) == {file.name for file in files}
    headers = 0
    for file in files:
        headers += 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert sum(file.stat().st_size for file in files) == size + headers


def test_a_tensor_larger_than_a_file_gets_one_of_its_own():
    tensors = tensors_of(make_config("tiny-moe"), unfused=True)
    files = split_into_files(tensors, 10_000)
    assert [t for file in files for t in file] == tensors
    assert all(len(f) == 1 or 2 * sum(math.prod(t.shape) for t in f) <= 10_000 for f in files)
    assert any(2 * math.prod(t.shape) > 10_000 for file in files for t in file)


def test_data_begins_where_transformers_may_map_it():
    header, places = lay_out(tensors_of(make_config("tiny")))
    assert len(header) % 8 == 0 and places[0][2] == len(header)


def test_a_folder_that_holds_a_checkpoint_is_refused(tmp_path):
    write_checkpoint(make_config("tiny"), tmp_path, device="cpu")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="holds a checkpoint already: model.safetensors"):
        write_checkpoint(make_config("tiny"), tmp_path, device="cpu", seed=1)
    assert (tmp_path / "model.safetensors").read_bytes() == before
