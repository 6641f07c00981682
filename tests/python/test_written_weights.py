"""Weights that a script writes after ``initialize``, beside an optimizer of its own: the fp32 masters follow."""

import itertools

import pytest
import strata
import torch
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
    train_step,
)

RULES = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
}


def _load(model):
    model.load_state_dict(make_model(seed=7).state_dict())


def _clamp(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


def _fill(model):
    model.head.weight.data.fill_(0.25)
    model.layers[1].up.bias.data[3:5] = 0.5


def _copy(model):
    with torch.no_grad():
        model.embedding.weight[2:].copy_(model.embedding.weight[:-2].clone())
        model.seventeen.mul_(2.0)


WRITES = (_load, _clamp, _fill, _copy)


def _written(stages, dtypes, accumulations, rules):
    rank, world = rank_and_world()
    for stage, dtype, accumulation, rule in itertools.product(stages, dtypes, accumulations, rules):
        reference = PlainTrainer(make_model(), world, RULES[rule], dtype=DTYPES[dtype], accumulation=accumulation,
                                 loss_scale=256.0 if dtype == "fp16" else 1.0)
        model = make_model()
        engine = make_engine(model, config_of(stage, dtype, accumulation, optimizer=False),
                             optimizer=RULES[rule](model.parameters()))
        batches = iter(make_batches((len(WRITES) + 1) * accumulation, world))
        for write in (None, *WRITES):
            if write is not None:
                write(model)
                write(reference.model)
                _follow(reference)
            for tokens in itertools.islice(batches, accumulation):
                reference.micro_step(tokens, loss_of)
                with exact_square_roots():
                    train_step(engine, tokens[rank])
            reference.step()
            case = (stage, dtype, accumulation, rule, write)
            assert differences(full_parameters(model), reference.values()) == [], case
        engine.destroy()


def _follow(reference):
    """Masters of weights that were written."""
    with torch.no_grad():
        for parameter, master in zip(reference.parameters, reference.masters):
            changed = master.to(parameter.dtype) != parameter
            master.copy_(torch.where(changed, parameter.float(), master))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_masters_of_the_users_optimizer_follow_weights_that_are_written(world):
    """At stage 3 what one rank has whole can be written so, too."""
    stages = {1: (0, 3), 2: (0, 1), 3: (2,)}[world]
    run_ranks(world, _written, stages, ("fp16",) if world == 3 else ("bf16",), (1 + world % 2,), ["momentum"])


def _read_and_saved(folder):
    rank, world = rank_and_world()
    model = make_model()
    engine = make_engine(model, config_of(1, "bf16", optimizer=False), optimizer=RULES["momentum"](model.parameters()))
    train_step(engine, make_batches(1, world)[0][rank])
    _load(model)
    master = strata.utils.safe_get_full_fp32_param(model.head.weight)
    assert torch.equal(master, model.head.weight.float())
    model.head.bias.data.fill_(0.25)
    engine.save_checkpoint(folder)
    engine.destroy()
    model = make_model(seed=3)
    engine = make_engine(model, config_of(1, "bf16", optimizer=False), optimizer=RULES["momentum"](model.parameters()))
    engine.load_checkpoint(folder)
    wanted = make_model(seed=7).bfloat16()
    wanted.head.bias.data.fill_(0.25)
    assert differences(full_parameters(model), dict(wanted.named_parameters())) == []


def test_written_weights_are_read_and_saved(tmp_path):
    run_ranks(2, _read_and_saved, str(tmp_path))
