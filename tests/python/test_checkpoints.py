"""Training that continues from a checkpoint, on any ranks and at any stage, equals training that never stopped."""


import numpy
import pytest
import strata
import torch
from ranks import run_ranks
from soak import also, each_once
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
from training_states import snapshot

SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 1e-2}}}


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
        expected, counts = snapshot(straight), _counts(straight)
        straight.destroy()

        half = 5 * accumulation
        first = make_engine(make_model(), config)
        assert [train_step(first, batch[rank]) for batch in batches[:half]] == losses[:half]
        assert first.save_checkpoint(f"{folder}/{stage}", client_state={"epoch": 3}) is True
        saved = snapshot(first)
        first.destroy()

        torch.manual_seed(2)
        second = make_engine(make_model(), config)
        train_step(second, batches[-1][rank])  # its earlier values must not matter
        for _ in range(accumulation - 1):
            train_step(second, batches[-1][rank])
        path, client_state = second.load_checkpoint(f"{folder}/{stage}")
        assert path == f"{folder}/{stage}/global_step5" and client_state == {"epoch": 3}
        assert differences(snapshot(second), saved) == []
        assert [train_step(second, batch[rank]) for batch in batches[half:]] == losses[half:]
        assert differences(snapshot(second), expected) == [] and _counts(second) == counts
        second.destroy()


@each_once({"world": [1, 2, 3], "dtype": ["fp32", "bf16", "fp16"]})
def test_going_on_equals_never_having_stopped(world, dtype, tmp_path):
    run_ranks(world, _resumed, str(tmp_path), (0, 1, 2, 3) if world == 2 else (2, 3), dtype, 2 if world == 2 else 1)


def _trained(folder, stage, dtype, steps=3):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
    for batch in make_batches(steps, 1):
        train_step(engine, batch[0])
    engine.save_checkpoint(folder, tag="here")
    return {name: value.numpy() if value.dtype != torch.bfloat16 else value.float().numpy()
            for name, value in snapshot(engine).items()}  # fmt: skip


def _loaded(folder, stages, dtype, expected):
    for stage in stages:
        engine = make_engine(make_model(), config_of(stage, dtype, live_bytes=1))
        engine.load_checkpoint(folder, tag="here")
        found = snapshot(engine)
        for name, value in expected.items():
            assert numpy.array_equal(found[name].float().numpy(), value), name
        engine.destroy()


@pytest.mark.parametrize("dtype", ["bf16", *also("fp32", "fp16")])
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
    more = {"sgd": {"momentum": 0.9}, "asgd": {"t0": 2}}  # averages from the third step on
    return {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad,
            "nadam": torch.optim.NAdam, "asgd": torch.optim.ASGD}[kind](groups, **more.get(kind, {}))


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


@pytest.mark.parametrize("kind", ["adamw", "asgd", *also("sgd", "rmsprop", "adagrad", "nadam")])
def test_an_optimizer_of_the_scripts_goes_on(kind, tmp_path):
    run_ranks(2, _everything, str(tmp_path), kind, (1, 3))


def _module_only(folder):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, "bf16", **SCHEDULER))
    batches = make_batches(4, world)
    for batch in batches[:3]:
        train_step(engine, batch[rank])
    engine.save_checkpoint(folder)
    saved = snapshot(engine)
    engine.destroy()
    torch.manual_seed(5)
    engine = make_engine(make_model(), config_of(3, "bf16", **SCHEDULER))
    train_step(engine, batches[3][rank])
    moments = {k: v for k, v in snapshot(engine).items() if k.startswith("exp")}
    engine.load_checkpoint(folder, load_module_only=True)
    found = snapshot(engine)
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
