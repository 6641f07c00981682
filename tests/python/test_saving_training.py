"""Saving checkpoints: the script's state, refused calls, saving beside training, and a rank or writer that dies."""

import argparse
import json
import os
import resource
import signal
import threading

import numpy
import pytest
import strata
import torch
from devices import ON_GPU, shares_a_gpu
from ranks import run_ranks
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
    train_step,
)
from training_states import snapshot, told_by


def _client_state(folder):
    rank, _ = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    state = {
        "number": 1.5, "nothing": None, "flag": True, "text": "ä\n", "big": 2**70, "inf": float("-inf"),
        "list": [1, [2]], "tuple": (1, (2, "x")), 7: "key", "tensor": torch.arange(4).reshape(2, 2),
        "scalar": torch.tensor(3.0), "bfloat": torch.ones(3, dtype=torch.bfloat16), "bytes": b"\0\xff",
        "args": argparse.Namespace(lr=1e-3, names=["a"]), "numpy": numpy.float32(0.5), "array": numpy.eye(2),
        "rng": torch.get_rng_state(), "nested": {"a": {"b": torch.zeros(0)}},
        "same.name": torch.ones(2), "same": {"name": torch.zeros(2)}, "complex": 1 + 2j,
        "phase": torch.tensor([1 + 2j, 3j]).conj(), "waves": numpy.array([[1j]]),
    }  # fmt: skip
    engine.save_checkpoint(folder, tag="t", client_state=state)
    _, found = engine.load_checkpoint(folder)
    assert found.keys() == state.keys()
    for key in ("number", "nothing", "flag", "text", "big", "inf", "list", "tuple", 7, "bytes", "args", "numpy",
                "complex"):
        assert found[key] == state[key] and type(found[key]) in (type(state[key]), float), key
    for key in ("tensor", "scalar", "bfloat", "rng", "same.name", "phase"):
        assert same_bits(found[key], state[key]), key
    assert same_bits(found["same"]["name"], torch.zeros(2)) and numpy.array_equal(found["waves"], state["waves"])
    assert numpy.array_equal(found["array"], state["array"]) and found["nested"]["a"]["b"].shape == (0,)
    words = r"client_state.hook: a checkpoint keeps .* found a value of builtins.function"
    with pytest.raises(strata.UsageError, match=words):
        engine.save_checkpoint(folder, tag="u", client_state={"hook": lambda: 0} if rank == 0 else {"hook": told_by})
    assert "u" not in os.listdir(folder)


def test_the_scripts_values_come_back_without_pickle(tmp_path):
    run_ranks(2, _client_state, str(tmp_path))
    for folder, _, names in os.walk(tmp_path):
        others = [name for name in names if not name.endswith((".json", ".safetensors"))]
        assert set(others) <= {"latest", ".strata.lock", "zero_to_fp32.py"}, folder
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["training"]["global_steps"] == 0


def _refusals(folder):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    assert engine.load_checkpoint(folder) == (None, None)
    told = {
        "absent": told_by(engine.load_checkpoint, folder, tag="nowhere"),
        "climbs": told_by(engine.save_checkpoint, folder, tag="../out"),
        "differ": told_by(engine.save_checkpoint, folder, tag=f"r{rank}"),
        "custom": told_by(engine.load_checkpoint, folder, custom_load_fn=print),
    }
    if rank == 0:
        os.makedirs(f"{folder}/data")
        with open(f"{folder}/data/mine", "w") as file:
            file.write("precious")
    engine._collectives.barrier()
    told["foreign"] = told_by(engine.save_checkpoint, folder, tag="data")
    with open(f"{folder}/data/mine") as file:
        assert file.read() == "precious"
    engine.save_checkpoint(folder, tag="good")
    told["named"] = told_by(engine.load_checkpoint, folder, tag="bad")
    engine.destroy()
    torch.manual_seed(0)
    other = make_engine(torch.nn.Sequential(torch.nn.Linear(4, 4)), config_of(3))
    told["model"] = told_by(other.load_checkpoint, folder)
    before = full_parameters(other.module)
    assert other.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)[0].endswith("good")
    assert differences(full_parameters(other.module), before) == []
    other.destroy()
    return told


def test_what_cannot_be_saved_or_loaded_is_said_on_every_rank(tmp_path):
    words = {
        "absent": ("IoError", "no whole checkpoint 'nowhere'", "there is none at all"),
        "climbs": ("UsageError", "name of a folder", "'../out'"),
        "differ": ("UsageError", "rank 0 has 'r0', rank 1 has 'r1'"),
        "custom": ("UsageError", "custom_load_fn"),
        "foreign": ("UsageError", "something else has the name", "/data"),
        "named": ("IoError", "there are good"),
        "model": ("FormatError", "of another model", "0.weight", "load_module_strict=False"),
    }
    for told in run_ranks(2, _refusals, str(tmp_path)):
        for key, expected in words.items():
            assert all(word in told[key] for word in expected), told[key]


def _kept(folder):
    rank, _ = rank_and_world()
    engine = make_engine(make_model(), config_of(2, checkpoint={"keep": 2}))
    for number, batch in enumerate(make_batches(4, 2)):
        train_step(engine, batch[rank])
        engine.save_checkpoint(folder, save_latest=number != 3)
    engine.destroy()


def test_the_oldest_go_but_not_the_one_that_latest_names(tmp_path):
    run_ranks(2, _kept, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".strata.lock", "global_step3", "global_step4", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "global_step3"


# Bytes of the host where the norm of a GPU's gradients arrives, of a step that does not wait for it.
NORM = 16 if ON_GPU else 0


def _beside_training(folder, stage, dtype):
    """A save beside training holds the states at the time of the call, and training goes on with the same bits."""
    rank, world = rank_and_world()
    config = config_of(stage, dtype, live_bytes=1, checkpoint={"async": True, "keep": 3})
    batches = make_batches(6, world)
    plain = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
    snapshots = []
    for batch in batches:
        train_step(plain, batch[rank])
        snapshots.append(snapshot(plain))
    plain.save_checkpoint(folder, tag="plain")
    ring = plain.memory_report()["host", "staging"][1]  # of a save at once, and of loading
    assert ring <= plain.memory_forecast("host")["staging"] <= ring + NORM and ring > 0
    plain.destroy()
    engine = make_engine(make_model(), config)
    for batch in batches:
        train_step(engine, batch[rank])
        engine.save_checkpoint(folder)
    assert differences(snapshot(engine), snapshots[-1]) == []
    copied = engine.memory_report()["host", "staging"][0]
    assert copied > NORM and abs(copied + ring - engine.memory_forecast("host")["staging"]) <= NORM
    engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    engine.destroy()
    again = make_engine(make_model(), config)
    for number in (4, 5, 6):
        again.load_checkpoint(folder, tag=f"global_step{number}")
        assert differences(snapshot(again), snapshots[number - 1]) == []
    again.save_checkpoint(folder, tag="last")
    again.destroy()  # waits


@pytest.mark.parametrize("world, stage, dtype", [(1, 3, "fp32"), (2, 3, "bf16"), (3, 2, "fp16")])
def test_saves_beside_training(world, stage, dtype, tmp_path):
    run_ranks(world, _beside_training, str(tmp_path), stage, dtype)
    assert (tmp_path / "latest").read_text() == "last" and len(list(tmp_path.iterdir())) == 6


def _writer_fails(folder):
    """A failure of one rank's writer is an error of the next call on every rank; the checkpoint before stays."""
    rank, _ = rank_and_world()
    engine = make_engine(make_model(), config_of(3, checkpoint={"async": True}))
    engine.save_checkpoint(folder, tag="good")
    engine.wait_for_checkpoint()
    told = []
    for call in (engine.wait_for_checkpoint, lambda: engine.save_checkpoint(folder, tag="next"), engine.destroy):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
        engine.save_checkpoint(folder, tag="bad")
        told.append(told_by(call))  # waits for the writer
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return told


def test_what_the_writer_could_not_do_is_never_lost(tmp_path):
    for told in run_ranks(2, _writer_fails, str(tmp_path)):
        assert len(told) == 3
        for message in told:
            assert message.startswith("IoError") and "beside training failed on rank 1" in message, message
    assert sorted(p.name for p in tmp_path.iterdir()) == [".strata.lock", "good", "latest", "zero_to_fp32.py"]


def _killed(folder, asynchronous, victim, delay):
    """Saves again and again; the victim dies at a moment that is not a step's."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, checkpoint={"async": asynchronous, "keep": 2}))
    batches = make_batches(40, world)
    train_step(engine, batches[0][rank])
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(strata.CommError):
        for batch in batches[1:]:
            train_step(engine, batch[rank])
            engine.save_checkpoint(folder, tag="same" if delay * 1e4 % 2 < 1 else None)


def _each_step():
    """{steps taken: the training states then, as arrays}."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    kept = {}
    for batch in make_batches(40, world):
        train_step(engine, batch[rank])
        kept[engine.global_steps] = {name: value.numpy() for name, value in snapshot(engine).items()}
    return kept


def _whole(folders, expected):
    def assert_as_trained(engine):
        found, wanted = snapshot(engine), expected[engine.global_steps]
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not numpy.array_equal(found[name].numpy(), wanted[name])] == []

    for folder in folders:
        torch.manual_seed(3)
        engine = make_engine(make_model(), config_of(3))
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        assert_as_trained(engine)
        for tag in strata._C.whole_checkpoints(folder):
            engine.load_checkpoint(folder, tag=tag)
            assert_as_trained(engine)
        engine.save_checkpoint(folder, tag="after")  # files that the dead writer left are no hindrance
        assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
        engine.destroy()


@pytest.mark.skipif(shares_a_gpu(), reason="ten jobs that share one GPU take minutes")
def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path):
    random = numpy.random.default_rng(0)
    folders = []
    for moment in range(int(os.environ.get("STRATA_KILLS", "10"))):
        folders.append(str(tmp_path / f"{moment}"))
        delay = float(random.uniform(0.0, 0.12))
        run_ranks(2, _killed, folders[-1], moment % 2 == 1, moment // 2 % 2, delay, may_die=(0, 1))
    run_ranks(1, _whole, folders, run_ranks(2, _each_step)[0])
