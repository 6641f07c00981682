"""Parameters of one model under several update rules of the engine: bits of plain torch, states by name."""

import pytest
import strata
import torch
from comparison import compare
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from strata.ops.lion import DeepSpeedCPULion, FusedLion
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, make_batches, make_engine, make_model, rank_and_world, train_step,
)

PLACES = {
    "device": {},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def decay_by_shape(parameters):
    """Matrices decay apart from the gradient, and all others by it."""
    parameters = list(parameters)
    matrices = [p for p in parameters if len(getattr(p, "ds_shape", p.shape)) == 2]
    others = [p for p in parameters if not any(p is m for m in matrices)]
    groups = [{"params": matrices}, {"params": others, "decoupled_weight_decay": False}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)


def _adam_beside_adamw(stages, dtype, place):
    _, world = rank_and_world()
    for stage in stages:
        config = config_of(stage, dtype, optimizer=False, **PLACES[place])
        model = make_model()
        reference = PlainTrainer(make_model(), world, decay_by_shape, DTYPES[dtype])
        with exact_square_roots():
            compare(config, reference, make=lambda model=model: model,
                    engine_kwargs={"optimizer": decay_by_shape(model.parameters())})


@pytest.mark.parametrize(("dtype", "place"), [("fp32", "device"), ("bf16", "host")])
def test_a_model_with_adam_and_adamw_has_the_bits_of_torch(dtype, place):
    run_ranks(2, _adam_beside_adamw, (0, 3), dtype, place)


def _resumed(folder):
    rank, world = rank_and_world()
    batches = make_batches(4, 3)

    def trained(steps, load=False):
        model = make_model()
        engine = make_engine(model, config_of(3, "bf16", optimizer=False), optimizer=decay_by_shape(model.parameters()))
        if load:
            engine.load_checkpoint(str(folder))
        for tokens in steps:
            train_step(engine, tokens[rank])
        return engine

    engine = trained(batches[:2])
    engine.save_checkpoint(str(folder))
    for tokens in batches[2:]:
        train_step(engine, tokens[rank])
    expected = full_parameters(engine.module)
    engine.destroy()
    engine = trained(batches[2:], load=True)
    assert differences(full_parameters(engine.module), expected) == []
    state = strata.utils.safe_get_full_optimizer_state(engine.module.one, "exp_avg_sq")
    assert state.shape == engine.module.one.ds_shape and state.abs().max() > 0
    with pytest.raises(strata.UsageError, match="found are exp_avg, exp_avg_sq"):
        strata.utils.safe_get_full_optimizer_state(engine.module.one, "momentum_buffer")
    engine.destroy()


def test_it_continues_from_a_checkpoint(tmp_path):
    run_ranks(2, _resumed, tmp_path)


def _lion_of(parameters):
    return DeepSpeedCPULion(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


LION = {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}}


def _lion(stages, dtype, place):
    _, world = rank_and_world()
    for stage in stages:
        reference = PlainTrainer(make_model(), world, _lion_of, DTYPES[dtype], clipping=0.5,
                                 loss_scale=256.0 if dtype == "fp16" else 1.0)
        config = config_of(stage, dtype, optimizer=False, clipping=0.5, **PLACES[place]) | {"optimizer": LION}
        compare(config, reference)


@pytest.mark.parametrize(("dtype", "place"), [("fp32", "device"), ("bf16", "host"), ("fp16", "device")])
def test_lion_has_the_bits_of_torchs_operations(dtype, place):
    run_ranks(2, _lion, (0, 2, 3), dtype, place)


def _lion_has_one_state():
    model = make_model()
    engine = make_engine(model, config_of(3, optimizer=False), optimizer=FusedLion(model.parameters(), lr=1e-3))
    for tokens in make_batches(2, 1):
        train_step(engine, tokens[0])
    states = engine.optimizer.state_dict()["state"]
    assert all(set(kept) == {"step", "exp_avg"} for kept in states.values()) and states
    with pytest.raises(strata.UsageError, match="found are exp_avg$"):
        strata.utils.safe_get_full_optimizer_state(model.one, "exp_avg_sq")
    assert isinstance(engine.optimizer, FusedLion) and engine.optimizer.inner is None
    engine.destroy()


def test_an_object_of_lion_is_computed_by_the_engine():
    run_ranks(1, _lion_has_one_state)
