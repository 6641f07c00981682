"""Checkpoints of training: going on equals never having stopped, whatever ranks and stage go on."""

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
from ranks import run_ranks
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
    train_step,
)

SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 1e-2}}}


def _snapshot(engine):
    """Bits of everything that training goes on from, whole, on this rank."""
    bits = {name: value.cpu() for name, value in full_parameters(engine.module).items()}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = strata.utils.safe_get_full_optimizer_state(parameter, key)
            if state is not None:
                bits[f"{key} {name}"] = state.cpu()
        master = strata.utils.safe_get_full_fp32_param(parameter)
        if master is not None:
            bits[f"master {name}"] = master.cpu()
    return bits


def _counts(engine):
    return (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.core.loss_scale, engine.get_lr(),
            engine.lr_scheduler.state_dict() if engine.lr_scheduler else None)  # fmt: skip


def _resumed(folder, stages, dtype, accumulation):
    """Ten steps against five, saved, loaded into another engine, and five."""
    rank, world = rank_and_world()
    for stage in stages:
        config = config_of(stage, dtype, accumulation=accumulation, clipping=0.5, live_bytes=1, **SCHEDULER)
        batches = make_batches(10 * accumulation, world)
        torch.manual_seed(1)
        straight = make_engine(make_model(), config)
        losses = [train_step(straight, batch[rank]) for batch in batches]
        expected, counts = _snapshot(straight), _counts(straight)
        straight.destroy()

        half = 5 * accumulation
        first = make_engine(make_model(), config)
        assert [train_step(first, batch[rank]) for batch in batches[:half]] == losses[:half]
        assert first.save_checkpoint(f"{folder}/{stage}", client_state={"epoch": 3}) is True
        saved = _snapshot(first)
        first.destroy()

        torch.manual_seed(2)
        second = make_engine(make_model(), config)
        train_step(second, batches[-1][rank])  # what it had before must not matter
        for _ in range(accumulation - 1):
            train_step(second, batches[-1][rank])
        path, client_state = second.load_checkpoint(f"{folder}/{stage}")
        assert path == f"{folder}/{stage}/global_step5" and client_state == {"epoch": 3}
        assert differences(_snapshot(second), saved) == []
        assert [train_step(second, batch[rank]) for batch in batches[half:]] == losses[half:]
        assert differences(_snapshot(second), expected) == [] and _counts(second) == counts
        second.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_going_on_equals_never_having_stopped(world, dtype, tmp_path):
    run_ranks(world, _resumed, str(tmp_path), (0, 1, 2, 3) if world == 2 else (2, 3), dtype, 2 if world == 2 else 1)


def _trained(folder, stage, dtype, steps=3):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
    for batch in make_batches(steps, 1):
        train_step(engine, batch[0])
    engine.save_checkpoint(folder, tag="here")
    return {name: value.numpy() if value.dtype != torch.bfloat16 else value.float().numpy()
            for name, value in _snapshot(engine).items()}  # fmt: skip


def _loaded(folder, stages, dtype, expected):
    for stage in stages:
        engine = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
        engine.load_checkpoint(folder, tag="here")
        found = _snapshot(engine)
        for name, value in expected.items():
            assert numpy.array_equal(found[name].float().numpy(), value), name
        engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_other_ranks_and_stages_load_the_same_bits(dtype, tmp_path):
    for world, stage in ((4, 3), (2, 1)):
        folder = str(tmp_path / f"{world}")
        expected = run_ranks(world, _trained, folder, stage, dtype)[0]
        for others in (1, 2, 3, 4):
            run_ranks(others, _loaded, folder, (0, 1, 2, 3) if others == 2 else (3,), dtype, expected)


class WithBuffers(torch.nn.Module):
    """Frozen, tied and unused parameters, and buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embedding(tokens))))


def _user_optimizer(kind, model):
    slow, fast = [model.embedding.weight], [model.norm.weight, model.norm.bias, *model.unused.parameters()]
    groups = [{"params": slow, "lr": 0.1}, {"params": fast, "lr": 0.2}]
    if kind == "adamw":
        return torch.optim.AdamW(groups)
    return {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}[kind](
        groups, **({"momentum": 0.9} if kind == "sgd" else {}))


def _everything(folder, kind, stages):
    rank, world = rank_and_world()
    for stage in stages:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}

        def make():
            torch.manual_seed(0)
            model = WithBuffers()
            optimizer = _user_optimizer(kind, model)
            engine = strata.initialize(model=model, optimizer=optimizer, config=config)[0]
            engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
            return engine

        def steps(engine, numbers):
            for n in numbers:
                tokens = torch.arange(6, device=engine.device) + n + rank
                engine.backward(engine(tokens % 12).square().mean())
                engine.step()

        straight, first, second = make(), None, None
        steps(straight, range(6))
        expected = (full_parameters(straight.module), straight.module.norm.running_mean.clone(), straight.get_lr())
        straight.destroy()
        first = make()
        steps(first, range(3))
        first.optimizer.param_groups[1]["lr"] = 0.05  # a live rate
        first.save_checkpoint(f"{folder}/{stage}", exclude_frozen_parameters=True)
        first.optimizer.param_groups[1]["lr"] = 0.2
        first.destroy()
        second = make()
        steps(second, (9,))
        with torch.no_grad():
            second.module.norm.running_mean.zero_()
        frozen = full_parameters(second.module)["frozen.weight"]
        second.load_checkpoint(f"{folder}/{stage}")
        assert second.optimizer.param_groups[1]["lr"] == 0.05
        second.optimizer.param_groups[1]["lr"] = 0.1  # as StepLR has made it
        assert same_bits(full_parameters(second.module)["frozen.weight"], frozen)
        assert second.global_steps == 3 and second.lr_scheduler.last_epoch == 3
        steps(second, range(3, 6))
        assert differences(full_parameters(second.module), expected[0]) == []
        assert same_bits(second.module.norm.running_mean, expected[1])
        second.destroy()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop", "adagrad"])
def test_an_optimizer_of_the_scripts_goes_on(kind, tmp_path):
    run_ranks(2, _everything, str(tmp_path), kind, (1, 3))


def _client_state(folder):
    rank, _ = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    state = {
        "number": 1.5, "nothing": None, "flag": True, "text": "ä\n", "big": 2**70, "inf": float("-inf"),
        "list": [1, [2]], "tuple": (1, (2, "x")), 7: "key", "tensor": torch.arange(4).reshape(2, 2),
        "scalar": torch.tensor(3.0), "bfloat": torch.ones(3, dtype=torch.bfloat16), "bytes": b"\0\xff",
        "args": argparse.Namespace(lr=1e-3, names=["a"]), "numpy": numpy.float32(0.5), "array": numpy.eye(2),
        "rng": torch.get_rng_state(), "nested": {"a": {"b": torch.zeros(0)}},
    }  # fmt: skip
    engine.save_checkpoint(folder, tag="t", client_state=state)
    _, found = engine.load_checkpoint(folder)
    assert found.keys() == state.keys()
    for key in ("number", "nothing", "flag", "text", "big", "inf", "list", "tuple", 7, "bytes", "args", "numpy"):
        assert found[key] == state[key] and type(found[key]) in (type(state[key]), float), key
    for key in ("tensor", "scalar", "bfloat", "rng"):
        assert same_bits(found[key], state[key]), key
    assert numpy.array_equal(found["array"], state["array"]) and found["nested"]["a"]["b"].shape == (0,)
    with pytest.raises(strata.UsageError, match=r"client_state.hook: a checkpoint keeps .* found a value of builtins.function"):
        engine.save_checkpoint(folder, tag="u", client_state={"hook": lambda: 0} if rank == 0 else {"hook": _told})
    assert os.listdir(f"{folder}") .count("u") == 0


def test_the_scripts_values_come_back_without_pickle(tmp_path):
    run_ranks(2, _client_state, str(tmp_path))
    for folder, _, names in os.walk(tmp_path):
        others = ("latest", ".strata.lock", "zero_to_fp32.py")
        assert all(name.endswith((".json", ".safetensors")) or name in others for name in names), folder
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["training"]["global_steps"] == 0


def _told(function, *args, **kwargs):
    with pytest.raises(strata.Error) as error:
        function(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


def _refusals(folder):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    assert engine.load_checkpoint(folder) == (None, None)
    told = {
        "absent": _told(engine.load_checkpoint, folder, tag="nowhere"),
        "climbs": _told(engine.save_checkpoint, folder, tag="../out"),
        "differ": _told(engine.save_checkpoint, folder, tag=f"r{rank}"),
        "custom": _told(engine.load_checkpoint, folder, custom_load_fn=print),
    }
    engine.save_checkpoint(folder, tag="good")
    told["named"] = _told(engine.load_checkpoint, folder, tag="bad")
    engine.destroy()
    torch.manual_seed(0)
    other = make_engine(torch.nn.Sequential(torch.nn.Linear(4, 4)), config_of(3))
    told["model"] = _told(other.load_checkpoint, folder)
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


def _beside_training(folder, stage, dtype):
    """Saves beside training hold what training had when it called, and training goes on with the same bits."""
    rank, world = rank_and_world()
    config = config_of(stage, dtype, live_bytes=1, checkpoint={"async": True, "keep": 3})
    batches = make_batches(6, world)
    plain = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
    snapshots = []
    for batch in batches:
        train_step(plain, batch[rank])
        snapshots.append(_snapshot(plain))
    plain.destroy()
    engine = make_engine(make_model(), config)
    for batch in batches:
        train_step(engine, batch[rank])
        engine.save_checkpoint(folder)
    assert differences(_snapshot(engine), snapshots[-1]) == []
    assert engine.memory_report()["host", "staging"][0] > 0  # the copy
    engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
    engine.destroy()
    again = make_engine(make_model(), config)
    for number in (4, 5, 6):
        again.load_checkpoint(folder, tag=f"global_step{number}")
        assert differences(_snapshot(again), snapshots[number - 1]) == []
    again.save_checkpoint(folder, tag="last")
    again.destroy()  # waits


@pytest.mark.parametrize("world, stage, dtype", [(1, 3, "fp32"), (2, 3, "bf16"), (3, 2, "fp16")])
def test_saves_beside_training(world, stage, dtype, tmp_path):
    run_ranks(world, _beside_training, str(tmp_path), stage, dtype)
    assert (tmp_path / "latest").read_text() == "last" and len(list(tmp_path.iterdir())) == 6


def _writer_fails(folder):
    """What the writer of one rank could not do is said on every rank, by the next call; the one before stays."""
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
        while rank == 1 and not engine.checkpoint_saver().files_written:
            pass
        engine._collectives.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        told.append(_told(call))
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


def _whole(folders):
    for folder in folders:
        torch.manual_seed(3)
        engine = make_engine(make_model(), config_of(3))
        path, _ = engine.load_checkpoint(folder)
        assert path is not None and engine.global_steps >= 1
        for tag in strata._C.whole_checkpoints(folder):
            engine.load_checkpoint(folder, tag=tag)
        engine.save_checkpoint(folder, tag="after")  # what the dead one left is no hindrance
        assert not [name for name in os.listdir(folder) if name.endswith(".partial")]
        engine.destroy()


def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path):
    random = numpy.random.default_rng(0)
    folders = []
    for moment in range(int(os.environ.get("STRATA_KILLS", "20"))):
        folders.append(str(tmp_path / f"{moment}"))
        delay = float(random.uniform(0.0, 0.12))
        run_ranks(2, _killed, folders[-1], moment % 2 == 1, moment // 2 % 2, delay, may_die=(0, 1))
    run_ranks(1, _whole, folders)


def _module_only(folder):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, "bf16", **SCHEDULER))
    batches = make_batches(4, world)
    for batch in batches[:3]:
        train_step(engine, batch[rank])
    engine.save_checkpoint(folder)
    saved = _snapshot(engine)
    engine.destroy()
    torch.manual_seed(5)
    engine = make_engine(make_model(), config_of(3, "bf16", **SCHEDULER))
    train_step(engine, batches[3][rank])
    moments = {k: v for k, v in _snapshot(engine).items() if k.startswith("exp")}
    engine.load_checkpoint(folder, load_module_only=True)
    found = _snapshot(engine)
    assert engine.global_steps == 1 and engine.lr_scheduler.last_batch_iteration == 0
    assert differences({k: found[k] for k in moments}, moments) == []
    assert all(same_bits(found[k], saved[k]) for k in saved if not k.startswith("exp"))
    # A model for evaluation has no optimizer at all.
    engine.destroy()
    evaluated = make_engine(make_model(), config_of(3, "bf16", optimizer=False))
    evaluated.load_checkpoint(folder)
    assert all(same_bits(v, saved[k].to(DTYPES["bf16"])) for k, v in full_parameters(evaluated.module).items())
    with torch.no_grad():
        loss_of(evaluated, batches[0][rank])


def test_the_module_alone(tmp_path):
    run_ranks(2, _module_only, str(tmp_path))
