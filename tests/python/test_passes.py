"""Backward passes as scripts for plain torch write them, against plain torch: loss.backward() in all its forms,
outputs of every shape, and the passes that make a step. Each job sweeps the stages."""

import copy
import inspect
from functools import partial

import pytest
import strata
import torch
from comparison import adamw, compare, found
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiny_models import (
    TinyModel,
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)
from torch.utils.checkpoint import checkpoint

STAGES = (0, 1, 2, 3)
WORLDS = pytest.mark.parametrize("world", [1, 2])


def _found(stages):
    rank, world = rank_and_world()
    for stage in stages:
        for dtype, accumulation in (("fp32", 2), ("bf16", 2), ("fp16", 1)):
            torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
            reference = PlainTrainer(make_model(), world, adamw, torch_dtype, accumulation=accumulation)
            reference.loss_scale = 256.0 if dtype == "fp16" else 1.0
            compare(config_of(stage, dtype, accumulation, live_bytes=1), reference, backward=found)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_pass_that_autograd_runs_alone_trains_as_one_that_is_told(world):
    run_ranks(world, _found, STAGES if world < 3 else (3,))


def _one_loss_of_two_engines():
    rank, world = rank_and_world()
    for accumulation, told in ((1, False), (2, False), (2, True)):
        references = [PlainTrainer(make_model(seed=seed), world, adamw, accumulation=accumulation) for seed in (0, 1)]
        models = [make_model(seed=seed) for seed in (0, 1)]
        engines = [make_engine(m, config_of(stage, accumulation=accumulation)) for m, stage in zip(models, (3, 2))]
        for index, tokens in enumerate(make_batches(2 * accumulation, world)):
            for reference in references:
                reference.micro_step(tokens, loss_of)
            loss = loss_of(engines[0], tokens[rank]) + loss_of(engines[1], tokens[rank])
            engines[0].backward(loss) if told else loss.backward()
            for engine, reference in zip(engines, references):
                engine.step()
                if (index + 1) % accumulation == 0:
                    reference.step()
                    assert differences(full_parameters(engine.module), reference.values()) == []
        for engine in engines:
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_loss_of_two_engines(world):
    run_ranks(world, _one_loss_of_two_engines)


def _loss_scales_of_two_engines():
    """Each engine's gradients come at its own loss scale, whichever of them scaled the loss."""
    rank, world = rank_and_world()
    larger = {"fp16": {"enabled": True, "initial_scale_power": 10}}
    kinds = {"fp16": ("fp16", {}), "fp16 at 1024": ("fp16", larger), "bf16": ("bf16", {}), "fp32": ("fp32", {})}
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    for index, (other, how) in enumerate([("fp16", "found"), ("fp16 at 1024", "told"), ("fp16 at 1024", "found"),
                                          ("bf16", "found"), ("bf16", "told"), ("fp32", "nested")]):
        dtype, more = kinds[other]
        models = [make_model(seed=seed) for seed in (0, 1)]
        engines = [make_engine(models[0], config_of(3, "fp16", 2)),
                   make_engine(models[1], config_of(index % 4, dtype, 2, **more))]
        references = [PlainTrainer(make_model(seed=seed), world, adamw, torch_dtype, accumulation=2)
                      for seed, torch_dtype in ((0, torch.float16), (1, dtypes[dtype]))]
        references[0].loss_scale = 256.0
        references[1].loss_scale = {"fp16": 256.0, "fp16 at 1024": 1024.0}.get(other, 1.0)
        for tokens in make_batches(4, world):
            def second(model, batch):
                if how == "nested":
                    model = partial(checkpoint, model, use_reentrant=False)
                return loss_of(model, batch)

            loss = loss_of(engines[0], tokens[rank]) + second(engines[1], tokens[rank])
            engines[0].backward(loss) if how == "told" else engines[0].scale(loss).backward()
            for engine, reference in zip(engines, references):
                reference.micro_step(tokens, loss_of)
                engine.step()
                if engine.global_steps and engine.was_step_applied():
                    reference.step()
        for engine, reference in zip(engines, references):
            assert differences(full_parameters(engine.module), reference.values()) == [], (other, how)
            assert engine.skipped_steps == 0 and engine.global_steps == 2
        with pytest.raises(RuntimeError, match="fp16 needs a scaled loss"):
            (loss_of(engines[0], tokens[rank]) + loss_of(engines[1], tokens[rank])).backward()
        for engine in engines:
            engine.destroy()


def test_a_loss_of_two_engines_that_one_of_them_scales():
    run_ranks(2, _loss_scales_of_two_engines)


def _after_an_error():
    rank, world = rank_and_world()
    for stage in (0, 3):
        engine = make_engine(make_model(), config_of(stage))
        reference = PlainTrainer(make_model(), world, adamw)
        fails = [True]

        def fail(gradient, fails=fails):
            if fails[0]:
                raise KeyboardInterrupt("stop")

        engine.module.layers[0].up.bias.register_hook(fail)
        tokens = make_batches(1, world)[0]
        with pytest.raises(KeyboardInterrupt):
            loss_of(engine, tokens[rank]).backward()
        with pytest.raises(strata.UsageError, match="without a backward"):
            engine.step()
        with pytest.raises(KeyboardInterrupt):
            loss_of(engine, tokens[rank]).backward()
        fails[0] = False
        loss_of(engine, tokens[rank]).backward()
        engine.step()
        reference.micro_step(tokens, loss_of)
        reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == []
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_pass_that_failed_leaves_nothing(world):
    run_ranks(world, _after_an_error)


def _what_counts_as_a_step():
    rank, world = rank_and_world()
    tokens = make_batches(4, world)
    engine = make_engine(make_model(), config_of(2, accumulation=2))
    assert not engine.was_step_applied()
    applied = []
    for batch in tokens:
        train_step(engine, batch[rank])
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]
    engine.destroy()

    # Every step() is one, and losses are still divided.
    engine = make_engine(make_model(), config_of(2, accumulation=2, managed_gradient_accumulation=False))
    reference = PlainTrainer(make_model(), world, adamw, accumulation=2)
    for first, second in (tokens[:2], tokens[2:]):
        for batch, backward in ((first, lambda loss: loss.backward()), (second, engine.backward)):
            reference.micro_step(batch, loss_of)
            backward(loss_of(engine, batch[rank]))
            assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied()
        reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == []
    with pytest.raises(strata.UsageError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    engine.destroy()

    for stage in STAGES:
        engine = make_engine(make_model(), config_of(stage))
        reference = PlainTrainer(make_model(), world, adamw)
        for batch in tokens[:2]:
            with engine.coalesce_grad_reduction():
                for _ in range(2):
                    engine.backward(loss_of(engine, batch[rank]))
                with pytest.raises(strata.UsageError, match="coalesce_grad_reduction"):
                    engine.step()
                with pytest.raises(strata.UsageError, match="within itself"), engine.coalesce_grad_reduction():
                    pass
            assert engine.was_step_applied() == (engine.global_steps > 0)
            engine.step()
            reference.micro_step(batch, lambda model, b: 2.0 * loss_of(model, b))
            reference.step()
            assert differences(full_parameters(engine.module), reference.values()) == []
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_counts_as_a_step(world):
    run_ranks(world, _what_counts_as_a_step, timeout=240.0)


class Own(torch.optim.SGD):
    """A class of the user's that keeps something in attributes."""

    def __init__(self, parameters, **kwargs):
        super().__init__(parameters, **kwargs)
        self.kept = "kept"


def _parameters_and_optimizers():
    rank, world = rank_and_world()
    tokens = make_batches(3, world)
    for stage in STAGES:
        # Outside the optimizer: as they were, in a class of the user's and in torch's.
        for cls in (Own, torch.optim.AdamW):
            model, other = make_model(), make_model()
            kwargs = {"lr": 1e-2} if cls is Own else {"lr": 1e-2, "weight_decay": 0.1}
            chosen = [p for n, p in model.named_parameters() if not n.startswith("layers.0")]
            client = cls(chosen, **kwargs)
            engine, optimizer, _, _ = strata.initialize(
                model=model, config=config_of(stage, optimizer=False), optimizer=client)
            assert isinstance(optimizer, cls) and getattr(optimizer, "kept", "kept") == "kept"
            assert copy.copy(optimizer.param_groups) == optimizer.param_groups == client.param_groups
            for p in other.layers[0].parameters():
                p.requires_grad_(False)
            reference = PlainTrainer(other, world, lambda ps, c=cls, k=kwargs: c(ps, foreach=False, **k))
            for batch in tokens:
                reference.micro_step(batch, loss_of)
                train_step(engine, batch[rank])
                reference.step()
                assert differences(full_parameters(model), reference.values()) == [], (stage, cls)
            assert model.layers[0].up.weight.requires_grad and model.layers[0].up.weight.grad is not None
            assert model.head.weight.grad is None
            engine.destroy()


@WORLDS
def test_parameters_and_optimizers_that_the_script_chose(world):
    run_ranks(world, _parameters_and_optimizers, timeout=240.0)


def _no_group():
    with pytest.raises(strata.UsageError, match="dist_init_required.*init_process_group.*WORLD_SIZE=2"):
        strata.initialize(model=make_model(), config=config_of(2), dist_init_required=False)


def test_ranks_without_a_group_are_told():
    run_ranks(2, _no_group)


def _forward_looks_like_itself():
    engine = make_engine(make_model(), config_of(3))
    assert list(inspect.signature(engine.module.forward).parameters) == ["tokens"]
    copied = copy.deepcopy(engine.module.head)
    assert type(copied.forward).__name__ == "method"
    other = make_engine(make_model(), config_of(3))
    with pytest.raises(RuntimeError, match="does not require grad"):
        other.backward(loss_of(other, make_batches(1, 2)[0, rank_and_world()[0]]).detach())


def test_forward_looks_like_itself():
    run_ranks(2, _forward_looks_like_itself)
