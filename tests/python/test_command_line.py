"""The program ``strata``: it is installed, starts quickly, and says the same as the Python face."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import strata
import torch
from devices import to_test_device
from hf_models import MODELS
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_models import config_of, make_engine, rank_and_world
from transformers import AutoModelForCausalLM

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


def find_program():
    """That of the build under test, or the one that the wheel has installed."""
    build = os.environ.get("STRATA_BUILD_DIR")
    folders = [Path(strata._C.__file__).resolve().parents[4]] + ([Path(build)] if build else [])
    for folder in folders:
        if (folder / "bin" / "strata").exists():
            return str(folder / "bin" / "strata")
    found = shutil.which("strata")
    assert found, "the program strata is neither in the build folder nor on PATH; run `make build`"
    return found


def run(*arguments, code=0):
    """The finished process."""
    done = subprocess.run([find_program(), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def report(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


def test_it_needs_neither_python_nor_torch():
    libraries = subprocess.run(["ldd", find_program()], capture_output=True, text=True, check=True).stdout
    assert not [line for line in libraries.splitlines() if "torch" in line or "python" in line or "not found" in line]
    assert run("--version").stdout.startswith("strata ")


def test_a_link_to_it_runs_the_python_beside_the_link(tmp_path):
    """As `make build` links it into a virtual environment."""
    (tmp_path / "strata").symlink_to(find_program())
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\nexit 2\n')
    (tmp_path / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "STRATA_PYTHON"}
    done = subprocess.run([tmp_path / "strata", "import-dcp", "a", "b", "--json"], capture_output=True, text=True,
                          env=environment)
    assert done.stdout == "-m strata.importing dcp a b --json\n" and done.returncode == 2, done.stderr


def _saved(tmp_path, name, dtype=torch.bfloat16):
    """The folder of a tiny model, as transformers saves it."""
    torch.manual_seed(3)
    model = MODELS[name].build().to(dtype)
    model.save_pretrained(tmp_path / name)
    return tmp_path / name


def _config(tmp_path, **more):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**CONFIG, **more}))
    return path


# Files do not tell that the positions of Whisper's encoder are frozen.
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"whisper"}))
@pytest.mark.parametrize("live", ["auto", 1])
def test_plan_says_what_python_foresees(tmp_path, name, live):
    section = {} if live == "auto" else {"strata": {"max_live_bytes": live}}
    told = report("plan", "--config", _config(tmp_path, **section), "--model", _saved(tmp_path, name), "--world", 2)
    with torch.device("meta"):
        model = MODELS[name].build().to(torch.bfloat16)
    for stage in range(4):
        zero = {**CONFIG["zero_optimization"], "stage": stage}
        foreseen = strata.memory_forecast(model, {**CONFIG, **section, "zero_optimization": zero}, 2)
        assert told["stages"][stage]["device"] == foreseen, stage


def test_plan_of_a_large_model_is_near_what_python_foresees(tmp_path):
    import transformers as hf

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = hf.Qwen3Config(**sizes, **heads, tie_word_embeddings=False)
    with torch.device("meta"):
        model = hf.Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path / "large"
    folder.mkdir()
    _write_header(folder / "model.safetensors", model.state_dict())
    told = report("plan", "--config", _config(tmp_path), "--model", folder, "--world", 8, "--device-memory", "80GiB")
    foreseen = strata.memory_forecast(model, CONFIG, 8)
    assert told["stages"][3]["fits"] is True
    for kind, held in told["stages"][3]["device"].items():
        assert held == pytest.approx(foreseen[kind], rel=0.02, abs=1 << 20), kind


def _write_header(path, tensors):
    """A safetensors file of zeroes, which take no room on the disk."""
    header, at = {}, 0
    for name in sorted(tensors):
        end = at + tensors[name].numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def test_plan_needs_the_headers_of_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run("plan", "--config", _config(tmp_path), "--model", tmp_path, "--world", 2, code=2)
    assert "strata.memory_forecast(model, config, world_size)" in done.stderr


def test_diff_reads_what_transformers_saves(tmp_path):
    one = _saved(tmp_path, "gpt2")
    other = shutil.copytree(one, tmp_path / "other")
    assert report("diff", one, other)["equal"] is True
    weights = load_file(other / "model.safetensors")
    name = sorted(weights)[3]
    weights[name].view(-1)[5] += 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    told = report("diff", one, other, code=1)
    before = load_file(one / "model.safetensors")[name]
    assert [entry["name"] for entry in told["largest"]] == [name]
    assert told["largest"][0]["at"] == 5
    assert told["largest"][0]["largest"] == (weights[name].double() - before.double()).abs().max().item()


def _saved_training(folder):
    """Two ranks train a tiny Qwen3 at stage 3 and save training and weights."""
    rank, _ = rank_and_world()
    torch.manual_seed(5)
    tiny = MODELS["qwen3"]
    engine = make_engine(tiny.build().train(), config_of(3, "bf16", live_bytes=1))
    for step in range(2):
        batch = to_test_device(tiny.batch(torch.Generator().manual_seed(step), step, rank))
        engine.backward(engine(**batch).loss)
        engine.step()
        engine.save_checkpoint(f"{folder}/run")
    engine.save_pretrained(f"{folder}/weights")


def test_training_is_inspected_consolidated_and_compared(tmp_path):
    run_ranks(2, _saved_training, str(tmp_path))
    # It never loads modules that take seconds to load, neither at its start nor later.
    for command in (["--help"], ["inspect", str(tmp_path / "run")]):
        log = tmp_path / "loaded"
        subprocess.run([find_program(), *command], check=True, capture_output=True,
                       env={**os.environ, "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(log)})
        (written,) = tmp_path.glob("loaded.*")
        loaded = {os.path.basename(name) for name in re.findall(r"file=(\S+) ", written.read_text())}
        written.unlink()
        assert "libc.so.6" in loaded and not [name for name in loaded if "python" in name or "torch" in name], loaded

    told = report("inspect", tmp_path / "run", "--verify")
    assert told["whole"] and told["verified"]
    assert told["tags"] == ["global_step1", "global_step2"] and told["latest"] == told["tag"] == "global_step2"
    assert (told["global_steps"], told["world_size"], told["stage"]) == (2, 2, 3)
    assert [kind["kind"] for kind in told["kinds"]] == ["value", "exp_avg", "exp_avg_sq"]
    assert told["tied"] == 1 and told["written_by"]["torch"] == torch.__version__

    written = report("consolidate", tmp_path / "run", tmp_path / "merged")
    assert "config.json" in written["copied"]
    ours, theirs = load_file(tmp_path / "merged/model.safetensors"), load_file(tmp_path / "weights/model.safetensors")
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).__name__ == "Qwen3ForCausalLM"

    assert report("diff", tmp_path / "run", tmp_path / "weights")["equal"]
    steps = [tmp_path / "run" / tag for tag in told["tags"]]
    assert report("diff", *steps, "--kinds", code=1)["differing"] > 0
    assert report("plan", "--config", _config(tmp_path), "--model", tmp_path / "run", "--world", 2)["elements"] == (
        told["parameters"]["elements"]
    )


def test_checkpoints_of_others_are_imported_by_the_same_program(tmp_path):
    for name in ("import-deepspeed", "import-dcp"):
        done = subprocess.run([find_program(), name, str(tmp_path / "none"), str(tmp_path / "out")], text=True,
                              capture_output=True, env={**os.environ, "STRATA_PYTHON": sys.executable,
                                                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
        assert done.returncode in (1, 2) and "none" in done.stderr and not done.stdout, done.stderr
