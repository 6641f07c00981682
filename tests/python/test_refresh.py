"""The lazy all-gather of weights that stay whole runs beside the next forward. A script that reads a parameter between
a step and that forward, in any way, sees the new values, or an error that says how to get them."""

import copy
import io

import pytest
import torch
from comparison import adamw, compare
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import each_once
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)

WORLD = 2


def _late(stage=2, dtype="fp32", accumulation=1, **more):
    return config_of(stage, dtype, accumulation, strata={"refresh_at": "forward"}, **more)


def _awaited(parameter):
    return "DeferredInit" in str(torch._C._dispatch_keys(parameter))


def _numerics(dtype):
    _, world = rank_and_world()
    for stage in range(4):
        for accumulation in (1, 2):
            reference = PlainTrainer(
                make_model(), world, adamw, DTYPES[dtype], 0.0, accumulation,
                loss_scale=2.0**8 if dtype == "fp16" else 1.0,
            )
            compare(_late(stage, dtype, accumulation), reference)


@each_once({"world": [1, 2, 3], "dtype": ["fp32", "bf16", "fp16"]})
def test_every_stage_has_the_bits_of_plain_torch(world, dtype):
    run_ranks(world, _numerics, dtype)


def _by_name(model, values):
    return dict(zip((name for name, _ in model.named_parameters()), values))


READERS = {
    "a held list": lambda model, held: _by_name(model, [p.detach().clone() for p in held]),
    ".data": lambda model, held: _by_name(model, [p.data.clone() for p in held]),
    "state_dict": lambda model, held: {n: t.clone() for n, t in model.state_dict().items()},
    "deepcopy": lambda model, held: {n: p.detach() for n, p in copy.deepcopy(model).named_parameters()},
    "foreach": lambda model, held: _by_name(model, torch._foreach_mul([p.detach() for p in held], 1.0)),
    "foreach on parameters": lambda model, held: _by_name(model, [t.detach() for t in torch._foreach_mul(held, 1.0)]),
    "out=": lambda model, held: _by_name(model, [torch.mul(p.data, 1.0, out=torch.empty_like(p)) for p in held]),
    "optional arguments": lambda model, held: {
        **{n: p.detach().clone() for n, p in model.named_parameters()},
        "head.bias": torch.nn.functional.linear(
            torch.zeros(1, 16, device=held[0].device), model.head.weight, model.head.bias
        ).detach()[0],
    },
    "saved and loaded": lambda model, held: _loaded(model.state_dict()),
}


def _loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _reading():
    rank, world = rank_and_world()
    batches = make_batches(len(READERS), world)
    reference = PlainTrainer(make_model(), world, adamw, torch.float32, 0.0, 1)
    engine = make_engine(make_model(), _late())
    held = list(engine.module.parameters())
    for (way, read), tokens in zip(READERS.items(), batches):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step(engine.get_global_grad_norm())
        assert [n for n, p in engine.module.named_parameters() if not _awaited(p)] == [], way
        assert differences(read(engine.module, held), reference.values()) == [], way
        assert [p.shape for p in held] == [p.shape for p in make_model().parameters()]
    engine.destroy()


def test_every_way_of_reading_sees_the_new_values():
    run_ranks(WORLD, _reading)


def _other_tensor_objects():
    rank, world = rank_and_world()
    first, second, third = make_batches(3, world)
    reference = PlainTrainer(make_model(), world, adamw, torch.float32, 0.0, 1)
    engine = make_engine(make_model(), _late())
    weight = engine.module.head.weight

    def step(tokens):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step(engine.get_global_grad_norm())

    step(first)
    taken = weight.data  # while it is awaited; read when it is not
    assert _awaited(weight) and _awaited(taken)
    step(second)
    # A read of `taken` would not wait for a lazy all-gather, so the weight was complete when the step ended.
    assert torch.equal(taken, reference.values()["head.weight"]) and not _awaited(taken)
    view = weight.detach()
    step(third)
    assert not _awaited(weight) and _awaited(engine.module.layers[0].up.weight)
    assert torch.equal(view, reference.values()["head.weight"])
    with torch.no_grad():
        engine.module.layers[0].up.weight.mul_(0.0)  # a write waits as well, and is not overwritten
    assert engine.module.layers[0].up.weight.abs().sum() == 0
    engine.destroy()


def test_other_tensor_objects_of_a_parameter_see_the_new_values():
    run_ranks(WORLD, _other_tensor_objects)


def _addresses():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), _late())
    weight = engine.module.head.weight
    address = weight.data_ptr()
    train_step(engine, make_batches(1, world)[0][rank])
    for ask in (lambda: weight.data_ptr(), lambda: weight.untyped_storage().clone(), lambda: weight.data.data_ptr()):
        with pytest.raises(RuntimeError, match='set strata.refresh_at to "step"'):
            ask()
    weight.detach()
    assert weight.data_ptr() == address
    engine.destroy()


def test_asking_for_an_address_says_what_to_do():
    run_ranks(WORLD, _addresses)


def _settings():
    rank, world = rank_and_world()
    tokens = make_batches(1, world)[0][rank]
    waits = {"strata": {"refresh_at": "step"}}, {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    for more in waits:
        engine = make_engine(make_model(), config_of(2, **more))
        train_step(engine, tokens)
        assert not any(_awaited(p) for p in engine.module.parameters())
        engine.destroy()
    engine = make_engine(make_model(), _late())
    train_step(engine, tokens)
    with torch.no_grad():
        loss_of(engine.module, tokens)  # past the engine: the blocks wait by themselves
    assert not any(_awaited(p) for n, p in engine.module.named_parameters() if "layers" in n)
    train_step(engine, tokens)
    kept = list(engine.module.parameters())
    engine.destroy()  # leaves ordinary parameters
    assert not any(_awaited(p) for p in kept) and all(torch.isfinite(p).all() for p in kept)


def test_settings_decide_when_and_destroy_leaves_nothing_behind():
    run_ranks(WORLD, _settings)
