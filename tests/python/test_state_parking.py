"""States that leave the device between two phases of training, and come back: the bits of never having left."""

import enum
import gc
import logging

import pytest
import strata
import torch
from ranks import run_ranks
from strata import utils
from strata.compat import config as compat_config
from strata.compat.engine import initialize
from strata.engine_weights import StateOffload
from tiny_models import (
    config_of,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
    train_step,
)

SHARDED = {"stage3_param_persistence_threshold": 0}  # whatever the size of a parameter
KINDS = ("weights", "gathered weights", "gradients", "gradient shards", "master weights", "optimizer state")


class OffloadStateTypeEnum(str, enum.Enum):
    """The enumeration that scripts bring from DeepSpeed."""

    optim_states = "optim_states"
    hp_params = "hp_params"


class OffloadDeviceEnum(str, enum.Enum):
    cpu = "cpu"
    none = "none"


def _held(engine, tier):
    report = engine.memory_report()
    return {kind: report[tier, kind][0] for kind in KINDS}


def _told(call, *args, **kwargs):
    with pytest.raises(strata.UsageError) as told:
        call(*args, **kwargs)
    return str(told.value)


def _backward(engine, tokens):
    engine.backward(loss_of(engine, tokens))


def _see_that_all_is_away(engine, some, tokens, folder):
    assert _held(engine, "device") == dict.fromkeys(KINDS, 0)
    for call in (
        lambda: engine(tokens),
        lambda: _backward(engine, tokens),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.state_dict(),
        lambda: utils.safe_get_full_fp32_param(some),
        lambda: utils.safe_get_full_grad(some),
        lambda: utils.safe_get_full_optimizer_state(some, "exp_avg"),
    ):
        assert "reload_states()" in _told(call)
    if engine.is_gradient_accumulation_boundary():
        assert "reload_states()" in _told(engine.step)
    with torch.no_grad():
        assert "reload_states()" in _told(engine, tokens)
    try:
        assert engine.module.embedding.weight.shape == (0,)  # where every rank has all of them
    except strata.UsageError as error:
        assert "reload_states()" in str(error)


def _train(stage, dtype, leaves, folder, **more):
    """Weights and states after four steps of two micro-steps, between which all is away in turns."""
    rank, world = rank_and_world()
    model = make_model()
    some = model.seventeen
    config = config_of(stage, dtype, accumulation=2, clipping=0.5, zero_optimization=SHARDED, **more)
    engine = make_engine(model, config)
    batches = make_batches(8, world)
    for micro, tokens in enumerate(batches):
        loss = loss_of(engine, tokens[rank])
        engine.backward(loss)
        if leaves and micro in (3, 4):  # before a step, and in the midst of one
            before, on_host = _held(engine, "device"), _held(engine, "host")
            engine.offload_states(pin_memory=micro == 3, non_blocking=True)
            engine.offload_states()
            _see_that_all_is_away(engine, some, tokens[rank], folder)
            gone = {kind: held - on_host[kind] for kind, held in _held(engine, "host").items()}
            assert gone["weights"] > 0
            engine.reload_states()
            engine.reload_states(non_blocking=True)
            assert _held(engine, "host") == on_host
            assert _held(engine, "device") == gone  # memory without values does not come back
            reduced = micro == 3 or "strata" not in more
            for kind in ("weights", "gradient shards" if reduced else "gradients", "master weights", "optimizer state"):
                assert gone[kind] == before[kind], kind
        engine.step()
    found = full_parameters(engine.module)
    states = [utils.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in model.parameters()]
    engine.destroy()
    return found, [s for s in states if s is not None]


def _never_having_left(stage, folder):
    for dtype, more in (("fp32", {}), ("bf16", {"strata": {"reduce_at": "boundary"}})):
        weights, states = _train(stage, dtype, False, folder, **more)
        again, states_again = _train(stage, dtype, True, folder, **more)
        assert all(same_bits(again[name], weights[name]) for name in weights), (stage, dtype)
        assert all(same_bits(one, other) for one, other in zip(states_again, states, strict=True)), (stage, dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_goes_on_as_if_states_had_never_left(world, tmp_path):
    run_ranks(world, _all_stages, str(tmp_path))


def _all_stages(folder):
    for stage in (0, 1, 2, 3):
        _never_having_left(stage, folder)


def _some_states(folder):
    """Evaluation and saving between two phases, while the states that only steps need are away."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, "bf16", zero_optimization=SHARDED))
    batches = make_batches(3, world)
    train_step(engine, batches[0][rank])
    engine.save_checkpoint(folder)
    engine.offload_states(include=list(OffloadStateTypeEnum), device=OffloadDeviceEnum.cpu)
    held = _held(engine, "device")
    assert held["optimizer state"] == held["master weights"] == 0 < held["weights"]
    assert _held(engine, "host")["master weights"] > 0
    with torch.no_grad():
        loss_of(engine, batches[1][rank])
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        assert engine.module.embedding.weight.shape == (11, 16)
    assert "reload_states()" in _told(engine.load_checkpoint, folder)
    _backward(engine, batches[1][rank])
    assert "away are optim_states, hp_params" in _told(engine.step)
    engine.offload_states(include=["lp_params"])
    engine.destroy()  # whole parameters keep their values
    assert world > 1 or engine.module.embedding.weight.shape == (11, 16)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_at_its_place_can_be_used(world, tmp_path):
    run_ranks(world, _some_states, str(tmp_path))


def _steps_of(optimizer, leaves, dtype):
    rank, world = rank_and_world()
    model = make_model()
    engine = make_engine(model, config_of(2, dtype, optimizer=False), optimizer=optimizer(model.parameters()))
    some = model.head.weight
    for step, tokens in enumerate(make_batches(4, world)):
        train_step(engine, tokens[rank])
        if leaves and step % 2 == 1:
            engine.offload_states()
            assert "reload_states()" in _told(utils.safe_get_local_optimizer_state, some, "momentum_buffer")
            assert all(p.numel() == 0 for group in engine.optimizer.inner.param_groups for p in group["params"])
            engine.reload_states()
    found = full_parameters(engine.module)
    engine.destroy()
    return found


def _users_optimizer():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for dtype in ("fp32", "bf16"):
        stayed, left = _steps_of(sgd, False, dtype), _steps_of(sgd, True, dtype)
        assert all(same_bits(stayed[name], left[name]) for name in stayed), dtype


def test_an_optimizer_of_the_users_gets_its_masters_back():
    run_ranks(2, _users_optimizer)


@pytest.mark.parametrize("of_the_users", [False, True])
def test_the_optimizer_forwards_to_the_engine(of_the_users):
    model = make_model()
    users = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if of_the_users else None
    engine, optimizer, *_ = strata.initialize(
        model=model, config=config_of(2, "bf16", optimizer=not of_the_users), optimizer=users
    )
    tokens = make_batches(1, 1)[0][0]
    train_step(engine, tokens)
    before = _held(engine, "device")
    optimizer.offload_states(include=list(OffloadStateTypeEnum), device=OffloadDeviceEnum.cpu, pin_memory=False,
                             non_blocking=True)
    held = _held(engine, "device")
    assert held["optimizer state"] == held["master weights"] == 0 < before["master weights"]
    assert held["weights"] == before["weights"] > 0
    _backward(engine, tokens)
    assert "reload_states()" in _told(engine.step)
    assert "found 'nvme'" in _told(optimizer.offload_states, device="nvme")
    optimizer.reload_states(non_blocking=True)
    engine.step()
    optimizer.offload_states()
    assert _held(engine, "device") == dict.fromkeys(KINDS, 0)
    optimizer.reload_states()
    engine.destroy()


def test_an_optimizer_without_an_engine_says_so():
    engine, optimizer, *_ = strata.initialize(model=make_model(), config=config_of(1))
    engine.destroy()
    del engine
    gc.collect()
    assert "keep the engine" in _told(optimizer.offload_states)
    assert "keep the engine" in _told(optimizer.reload_states)


def test_the_stand_ins_enumerations_name_states_and_places():
    config = config_of(2, "bf16", zero_optimization={"stage": compat_config.ZeroStageEnum.gradients})
    engine, *_ = initialize(model=make_model(), config=config)
    train_step(engine, make_batches(1, 1)[0][0])
    engine.offload_states(include=set(compat_config.OffloadStateTypeEnum), device=compat_config.OffloadDeviceEnum.cpu)
    assert _held(engine, "device") == dict.fromkeys(KINDS, 0)
    engine.reload_states(non_blocking=True)
    assert "found 'nvme'" in _told(engine.offload_states, device=compat_config.OffloadDeviceEnum.nvme)
    engine.destroy()


def test_the_device_none_moves_nothing_and_says_so(caplog):
    engine = make_engine(make_model(), config_of(1))
    before = _held(engine, "device")
    with caplog.at_level(logging.WARNING, logger="strata"):
        engine.offload_states(device=OffloadDeviceEnum.none)
    assert "nothing is moved" in caplog.text and _held(engine, "device") == before
    engine.destroy()


def test_weights_that_cannot_go_are_told_of_once(caplog):
    class Core:
        def offload_states(self, states, pinned):
            return "lp_params" not in states

    engine = StateOffload()
    engine.core, engine.global_rank, engine.collectives_name = Core(), 0, "gloo"
    with caplog.at_level(logging.WARNING, logger="strata"):
        engine.offload_states(include=["optim_states"])
        assert not caplog.text
        engine.offload_states()
        engine.offload_states()
    assert caplog.text.count("the weights (lp_params) stay on the device") == 1
