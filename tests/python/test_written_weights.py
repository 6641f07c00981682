"""Weights that a script writes after ``initialize``: fp32 masters that are kept beside them follow."""

import itertools
from contextlib import nullcontext

import pytest
import strata
import torch
from comparison import adamw
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


def _follow(reference, all_of_it=False):
    """Masters of written weights; ``all_of_it``: of all, as where a modifier rank's values go to all ranks."""
    with torch.no_grad():
        for parameter, master in zip(reference.parameters, reference.masters):
            written = parameter.to(master.device)
            changed = (master.to(written.dtype) != written) | all_of_it
            master.copy_(torch.where(changed, written.float(), master))


def _written_beside_our_adam(folder, places, stages):
    rank, world = rank_and_world()
    for stage, place in itertools.product(stages, places):
        if place != "none" and stage == 0:
            continue
        offload = {"device": place, "nvme_path": folder, "buffer_count": 5, "buffer_size": 4096}
        zero = {"stage": stage} if place == "none" else {"stage": stage, "offload_optimizer": offload}
        model = make_model()
        engine = make_engine(model, config_of(stage, "fp16", zero_optimization=zero))
        reference = PlainTrainer(make_model(), world, adamw, dtype=torch.float16, loss_scale=256.0)
        for write, tokens in zip((None, *WRITES), make_batches(len(WRITES) + 1, world), strict=True):
            if write is not None:
                engine.core.wait_for_all()  # a peer may still be taking this rank's new values
                everything = list(model.parameters())
                with strata.zero.GatheredParameters(everything, modifier_rank=0) if stage == 3 else nullcontext():
                    write(model)
                write(reference.model)
                _follow(reference, all_of_it=stage == 3)
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
            assert differences(full_parameters(model), reference.values()) == [], (stage, place, write)
        engine.core.wait_for_all()
        model.head.weight.data.fill_(0.125)
        if stage < 3:
            assert strata.utils.safe_get_full_fp32_param(model.head.weight).eq(0.125).all(), (stage, place)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_fp16_weights_follow_what_is_written_wherever_they_rest(world, tmp_path):
    run_ranks(world, _written_beside_our_adam, str(tmp_path), ("none", "cpu", "nvme"), range(4))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_masters_of_the_users_optimizer_follow_weights_that_are_written(world):
    """At stage 3 a script can write parameters so, too, where one rank has them whole."""
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
