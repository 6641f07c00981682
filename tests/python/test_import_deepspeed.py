"""Checkpoints that real DeepSpeed wrote go on under Strata to the losses that DeepSpeed itself goes on to."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import strata
import torch
from deepspeed_runs import (
    CASES, STEPS, WORLD, client_state_of_script, convert_to_universal, losses_of, make_engine, train_with_deepspeed,
)
from devices import ON_GPU
from ranks import run_ranks
from strata.importing.__main__ import main as command_line
from strata.importing.deepspeed import import_deepspeed
from strata.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tiny_models import rank_and_world

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="compared with DeepSpeed on the CPU"),
    pytest.mark.xdist_group("import_deepspeed"),  # tests of this file share DeepSpeed's checkpoints
]
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-4}  # of losses, as test_against_deepspeed.py has them
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of DeepSpeed's checkpoints, each rank's answer)."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, run_ranks(WORLD, train_with_deepspeed, str(folder), timeout=400.0, env={"DS_ACCELERATOR": "cpu"})


@pytest.fixture(scope="module")
def imported(saved, tmp_path_factory):
    """Folder of the same checkpoints, as Strata's."""
    out = tmp_path_factory.mktemp("imported")
    for stage, dtype in CASES:
        import_deepspeed(saved[0] / f"{stage}-{dtype}", out / f"{stage}-{dtype}")
    return out


def _whole(engine):
    masters, states = {}, {}
    for name, parameter in engine.module.named_parameters():
        value = strata.utils.safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is None:
            with strata.zero.GatheredParameters([parameter]):
                value = parameter.detach().float().clone()
        masters[name] = value.numpy()
        for kind in MOMENTS if parameter.requires_grad else ():
            states[kind, name] = strata.utils.safe_get_full_optimizer_state(parameter, kind).numpy()
    return masters, states


def _strata(folder, cases):
    rank, world = rank_and_world()
    ranks = [rank] if world == WORLD else range(WORLD)
    told = {}
    for stage, dtype in cases:
        engine = make_engine(strata, stage, dtype, seed=2, accumulation=len(ranks))
        with torch.no_grad():
            engine.module.factor.zero_()
        path, client_state = engine.load_checkpoint(f"{folder}/{stage}-{dtype}")
        assert os.path.basename(path) == "global_step3" and engine.global_steps == STEPS
        assert engine.module.factor.tolist() == [1.5] * 8 and engine.lr_scheduler.last_batch_iteration == STEPS - 1
        masters, _ = _whole(engine)
        losses = losses_of(engine, range(STEPS, 2 * STEPS), ranks)
        told[stage, dtype] = (losses, masters, engine.get_lr(), client_state)
        engine.destroy()
    return told


@pytest.mark.parametrize("world", [2, 1])
def test_an_imported_checkpoint_goes_on_to_deepspeedslosses_of(saved, imported, world):
    theirs = saved[1]
    for rank, told in enumerate(run_ranks(world, _strata, str(imported), CASES, timeout=300.0)):
        for stage, dtype in CASES:
            losses, masters, lr, client_state = told[stage, dtype]
            expected = theirs[rank][stage, dtype]
            if world == 1:  # the losses of both ranks, one after the other in a step
                wanted = [loss for step in zip(*(t[stage, dtype][0] for t in theirs)) for loss in step]
            else:
                wanted = expected[0]
            assert losses == pytest.approx(wanted, rel=TOLERANCES[dtype]), (stage, dtype)
            assert losses[0] != pytest.approx(losses[-1], rel=1e-3), "training must have changed something"
            common = masters.keys() & expected[1].keys()  # at stage 1 DeepSpeed's tool loses frozen parameters
            assert len(common) >= 5 or (stage, dtype) == (1, "bf16")
            for name in common:
                assert numpy.array_equal(masters[name], expected[1][name]), (stage, dtype, name)
            assert lr == pytest.approx(expected[2], rel=1e-6), (stage, dtype)
            _assert_same_values(client_state)


def _assert_same_values(found):
    expected = client_state_of_script()
    assert found.keys() == expected.keys()
    for key in ("epoch", "pair", "args", "number"):
        assert found[key] == expected[key], key
    assert torch.equal(found["rng"], expected["rng"]) and numpy.array_equal(found["array"], expected["array"])


def test_the_ranks_and_stage_that_load_are_free(imported):
    """A checkpoint of stage 1 at stage 3 on three ranks."""
    checkpoint = strata._C.TrainingCheckpoint(str(imported / "1-fp32" / "global_step3"))
    for told in run_ranks(3, _elsewhere, str(imported / "1-fp32")):
        assert len(told) == 10
        for (kind, name), value in told.items():
            assert numpy.array_equal(value, checkpoint.read("parameter", name, kind).numpy()), (kind, name)


def _elsewhere(folder):
    engine = make_engine(strata, 3, "fp32", seed=2)
    engine.load_checkpoint(folder)
    return _whole(engine)[1]


def test_whole_weights_are_those_of_deepspeeds_own_tool(saved):
    for stage, dtype in CASES:
        found = get_fp32_state_dict_from_zero_checkpoint(saved[0] / f"{stage}-{dtype}")
        expected = saved[1][0][stage, dtype][1]
        assert expected.keys() <= found.keys() and "frozen.weight" in found
        for name, value in expected.items():
            assert numpy.array_equal(found[name].float().numpy(), value), (stage, dtype, name)


def test_the_loss_scale_comes_with_it(saved, tmp_path):
    training = json.loads(strata._C.TrainingCheckpoint(import_deepspeed(saved[0] / "scaled", tmp_path)).training)
    assert training["loss_scale"] == 1024.0
    assert training["loss_scaler"] == {"scale": 1024.0, "iteration": 9, "last_overflow": 4, "hysteresis_left": 1}


def _universal(folder, stage):
    """DeepSpeed's own conversion, beside the checkpoint."""
    source = Path(folder) / f"{stage}-fp32" / "global_step3"
    convert_to_universal(source, f"{source}_universal")
    return source.parent


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints(saved, imported, stage, tmp_path):
    folder = shutil.copytree(saved[0] / f"{stage}-fp32", tmp_path / f"{stage}-fp32")
    path = import_deepspeed(_universal(tmp_path, stage), tmp_path / "out", tag="global_step3_universal")
    paths = (path, imported / f"{stage}-fp32" / "global_step3")
    found, expected = (strata._C.TrainingCheckpoint(str(path)) for path in paths)
    assert sorted(found.tensors()) == sorted(expected.tensors()) and folder.exists()
    for role, name, *_ in expected.tensors():
        for kind in ("value", *MOMENTS) if found.has(name, "exp_avg") else ("value",):
            assert torch.equal(found.read(role, name, kind), expected.read(role, name, kind)), (name, kind)
    found, expected = json.loads(found.training), json.loads(expected.training)
    for key in ("global_steps", "optimizer_steps", "scheduler", "loss_scale", "client_state"):
        assert found[key] == expected[key], key
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


# --- checkpoints that are refused, with the reason ---


def _told(source, out, **arguments):
    with pytest.raises(strata.Error) as error:
        import_deepspeed(source, out, **arguments)
    assert not out.exists() or not [p for p in out.iterdir() if p.name != ".strata.lock"]
    return f"{type(error.value).__name__}: {error.value}"


class Evil:
    """An object that an attacker would put into a file."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def _change(folder, name, change):
    path = folder / "global_step3" / name
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("stage", [2, 3])
def test_damaged_and_foreign_checkpoints_are_refused(saved, stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def copy(name):
        return shutil.copytree(saved[0] / f"{stage}-fp32", tmp_path / name)

    model = "mp_rank_00_model_states.pt" if stage == 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    optim = "zero_pp_rank_1_mp_rank_00_optim_states.pt"

    folder = copy("missing")
    (folder / "global_step3" / optim).unlink()
    told = _told(folder, out)
    assert told.startswith("IoError") and "optimizer's states of 1 ranks; wanted 2" in told
    folder = copy("first")
    (folder / "global_step3" / optim.replace("rank_1", "rank_0")).unlink()
    assert "the file of rank 0 is missing" in _told(folder, out)
    folder = copy("no model")
    for path in (folder / "global_step3").glob("*model_states.pt"):
        path.unlink()
    assert "the files of its model are missing" in _told(folder, out)

    folder = copy("cut")
    path = folder / "global_step3" / optim
    whole = path.stat().st_size
    for size in (whole - 1, whole // 2, whole // 4, 30, 0):
        os.truncate(path, size)
        told = _told(folder, out)
        assert told.startswith("FormatError") and optim in told and "cut off" in told, (size, told)

    folder = copy("evil")
    _change(folder, model, lambda content: content.update(gift=Evil()))
    told = _told(folder, out)
    assert told.startswith("FormatError") and model in told and "posix.mkdir" in told and not os.path.exists("ran")

    folder = copy("parallel")
    shutil.copy(folder / "global_step3" / optim, folder / "global_step3" / optim.replace("mp_rank_00", "mp_rank_01"))
    assert "tensor parallelism" in _told(folder, out) and "mp_rank_01" in _told(folder, out)
    folder = copy("parallel by its file")
    _change(folder, model, lambda content: content.update(mp_world_size=2))
    assert "mp_world_size 2" in _told(folder, out)

    folder = copy("short")
    key = "single_partition_of_fp32_groups" if stage == 2 else "fp32_flat_groups"

    def shorten(content):
        content["optimizer_state_dict"][key][0] = content["optimizer_state_dict"][key][0][:5].clone()

    _change(folder, optim, shorten)
    assert "too few for the parameters" in _told(folder, out)
    folder = copy("otherwise")
    _change(folder, optim, lambda content: content.update(optimizer_state_dict=[]))
    assert "lacks 'optimizer_state_dict'" in _told(folder, out)


def test_folders_that_are_none(saved, imported, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert "no folder of DeepSpeed's checkpoints" in _told(tmp_path / "empty", out)
    assert "there is no folder" in _told(tmp_path / "nowhere", out)
    assert "global_step9" in _told(saved[0] / "2-fp32", out, tag="global_step9")
    assert "no name of a folder" in _told(saved[0] / "2-fp32", out, tag="../2-fp32/global_step3")
    assert "no checkpoint of DeepSpeed" in _told(imported / "2-fp32", out)
    (tmp_path / "pipeline").mkdir()
    for name in ("mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt"):
        (tmp_path / "pipeline" / name).write_bytes(b"")
    assert "pipeline parallelism" in _told(tmp_path / "pipeline", out)
    (tmp_path / "pipeline" / "layer_01-model_00-model_states.pt").unlink()
    assert "saved without ZeRO" in _told(tmp_path / "pipeline", out)
    with pytest.raises(strata.UsageError, match="no checkpoint of Strata; give another folder"):
        import_deepspeed(saved[0] / "2-fp32", saved[0] / "2-fp32")
    assert (saved[0] / "2-fp32" / "global_step3" / "mp_rank_00_model_states.pt").exists()


def test_the_command_line(saved, tmp_path, capsys):
    arguments = ["deepspeed", str(saved[0] / "1-fp32" / "global_step3"), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-m", "strata.importing", *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "out" / "global_step3"), done.stderr
    assert (tmp_path / "out" / "latest").read_text() == "global_step3"
    assert command_line(["deepspeed", str(tmp_path), str(tmp_path / "other")]) == 1
    assert "no folder of DeepSpeed's checkpoints" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command_line(["deepspeed", str(tmp_path)])
