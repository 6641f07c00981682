"""``optimizer.state_dict()``: a rank's part of the optimizer's state, saved and loaded by hand."""

import collections
import copy
import io
import itertools

import pytest
import strata
import torch
from comparison import adamw
from devices import ON_GPU
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
    same_bits, train_step,
)

RULES = {
    "adamw": adamw,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
}


def _engine(stage, dtype, rule, seed=0, **more):
    model = make_model(seed=seed)
    return make_engine(model, config_of(stage, dtype, optimizer=False, **more),
                       optimizer=RULES[rule](model.parameters()))


def _through_a_file(state):
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _set_weights(engine, values):
    with strata.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if engine.global_rank == 0:
            with torch.no_grad():
                for name, parameter in engine.module.named_parameters():
                    parameter.copy_(values[name])


def _resumed(stages, dtypes, rules):
    """The script loads the weights first, or the optimizer: both ways give the bits of uninterrupted training."""
    rank, world = rank_and_world()
    batches = make_batches(4, world)
    for stage, dtype, rule in itertools.product(stages, dtypes, rules):
        engine = _engine(stage, dtype, rule)
        for tokens in batches[:2]:
            train_step(engine, tokens[rank])
        engine.optimizer.param_groups[0]["lr"] = 0.005
        state, weights = _through_a_file(engine.optimizer.state_dict()), full_parameters(engine.module)
        for tokens in batches[2:]:
            train_step(engine, tokens[rank])
        expected = full_parameters(engine.module)
        engine.destroy()
        for first in ("weights", "optimizer"):
            engine = _engine(stage, dtype, rule, seed=3)
            if first == "weights":
                _set_weights(engine, weights)
            engine.optimizer.load_state_dict(state)
            if first == "optimizer":
                _set_weights(engine, weights)
            assert engine.get_lr() == [0.005]
            for tokens in batches[2:]:
                train_step(engine, tokens[rank])
            case = (stage, dtype, rule, first)
            assert differences(full_parameters(engine.module), expected) == [], case
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_resumes_from_states_that_were_saved_by_hand(world):
    run_ranks(world, _resumed, (3, world - 1), ("bf16",) if world == 2 else ("fp32",), list(RULES))


@pytest.mark.skipif(ON_GPU, reason="torch's Adam rounds in another way on GPUs")
def test_the_state_of_one_rank_is_torchs():
    """The engine's optimizer loads torch's state, and torch's optimizer loads the engine's."""
    batches = [step[0] for step in make_batches(4, 1)]
    plain, engine = make_model(), _engine(2, "fp32", "adamw")
    optimizer = adamw(plain.parameters())
    assert engine.optimizer.state_dict()["state"] == {} == optimizer.state_dict()["state"]
    for tokens in batches[:2]:
        optimizer.zero_grad()
        loss_of(plain, tokens).backward()
        with exact_square_roots():
            optimizer.step()
        train_step(engine, tokens)
    ours, theirs = engine.optimizer.state_dict(), optimizer.state_dict()
    assert ours["param_groups"][0].items() >= {"lr": 1e-2, "params": theirs["param_groups"][0]["params"]}.items()
    filled = {n: kept for n, kept in theirs["state"].items() if kept["exp_avg"].numel()}
    assert ours["state"].keys() >= filled.keys()
    for number, kept in filled.items():
        for name, value in kept.items():
            assert same_bits(ours["state"][number][name], value), (number, name)

    other = _engine(3, "fp32", "adamw", seed=2)
    _set_weights(other, full_parameters(engine.module))
    other.optimizer.load_state_dict(_through_a_file(theirs))
    train_step(engine, batches[2])
    train_step(other, batches[2])
    assert differences(full_parameters(other.module), full_parameters(engine.module)) == []

    fresh = adamw(list(make_model().parameters()))
    fresh.load_state_dict(ours)
    assert all(fresh.state[p]["step"] == 2 for p in fresh.param_groups[0]["params"] if p.numel() and fresh.state[p])
    # Nothing is left of states that the loaded ones lack.
    other.optimizer.load_state_dict({"state": {}, "param_groups": theirs["param_groups"]})
    assert other.optimizer.state_dict()["state"] == {}


CLEARED = (
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
)


def _cleared():
    """Clears the optimizer's states, as ReLoRA and staged training do between stages."""
    rank, world = rank_and_world()
    for stage, dtype, rule, clear in itertools.product((0, 3), ("fp32", "bf16"), ("adamw", "momentum"), CLEARED):
        reference = PlainTrainer(make_model(), world, RULES[rule], DTYPES[dtype])
        engine = _engine(stage, dtype, rule)
        for step, tokens in enumerate(make_batches(4, world)):
            if step == 2:
                clear(engine.optimizer)
                clear(reference.optimizer)
                assert not engine.optimizer.state
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            reference.step()
            assert differences(full_parameters(engine.module), reference.values()) == [], (stage, dtype, rule, step)
        if rule == "adamw":
            with pytest.raises(strata.UsageError, match="safe_get_full_optimizer_state"):
                engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]
            with pytest.raises(strata.UsageError, match="optimizer.load_state_dict"):
                engine.optimizer.state = {0: {}}
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_states_that_a_script_clears_begin_anew(world):
    run_ranks(world, _cleared)


def _elsewhere():
    rank, world = rank_and_world()
    tokens = make_batches(1, world)[0][rank]
    for rule in ("adamw", "momentum"):
        engine = _engine(2, "bf16", rule)
        train_step(engine, tokens)
        state = engine.optimizer.state_dict()
        state["strata"]["rank"] = 1 - rank
        with pytest.raises(strata.UsageError, match=f"part of rank {1 - rank} of 2.*this is rank {rank}.*save_checkp"):
            engine.optimizer.load_state_dict(state)
        state["strata"]["rank"] = rank
        state["strata"]["parts"][0] = [(1, 2)]
        number = next(iter(state["state"]))
        state["state"] = {0: {name: torch.zeros(1) for name in state["state"][number]}}
        with pytest.raises(strata.UsageError, match="another rank's part.*engine.save_checkpoint"):
            engine.optimizer.load_state_dict(state)
        with pytest.raises(ValueError, match="1 param groups; found 2"):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"] * 2})
        before = full_parameters(engine.module)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # as Accelerate does at its start
        assert differences(full_parameters(engine.module), before) == []
        engine.destroy()


def test_a_part_of_another_rank_is_refused():
    run_ranks(2, _elsewhere)
