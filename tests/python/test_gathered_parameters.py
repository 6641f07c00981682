"""zero.GatheredParameters, and how released parameters look."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import each_once
from strata.zero import GatheredParameters
from tiny_models import (
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
from training_states import errors_into

WORLD = 2


def _engine(dtype="fp32", live_bytes=1):
    return make_engine(make_model(), config_of(3, dtype, live_bytes=live_bytes))


def _released_look():
    model = _engine().module
    original = make_model()
    weight = model.head.__dict__["_parameters"].copy()["weight"]
    assert weight.numel() == 0 and weight.shape == torch.Size([0])
    assert weight.ds_shape == torch.Size([11, 16]) and weight.ds_numel == 176
    assert weight.ds_status.name == "NOT_AVAILABLE"
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert sorted(p.ds_id for p in model.parameters()) == list(range(len(list(model.parameters()))))
    with GatheredParameters(weight):
        assert weight.ds_status.name == "AVAILABLE" and torch.equal(weight, original.head.weight)
        for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
            assert type(twin) is torch.nn.Parameter and torch.equal(twin, original.head.weight)
            assert not hasattr(twin, "ds_id")
    assert weight.numel() == 0


def test_released_parameters_look_as_deepspeeds():
    run_ranks(WORLD, _released_look)


def _reading():
    model, original = _engine().module, make_model()
    plain = torch.nn.Parameter(torch.ones(3))
    named = dict(model.named_parameters())  # an attribute read would gather, and hold until the next backward
    inputs = [named["head.bias"], None, named["head.bias"], plain, *model.layers[0].parameters()]
    with GatheredParameters(inputs):
        assert torch.equal(model.head.bias, original.head.bias) and plain.sum() == 3
        with GatheredParameters([model.head.bias, model.layers[0].up.bias]), GatheredParameters(model.head.bias):
            assert torch.equal(model.layers[0].up.bias, original.layers[0].up.bias)
        assert model.head.bias.numel() == 11 and model.layers[0].up.bias.numel() == 32
    with GatheredParameters([]), GatheredParameters(model.parameters(), enabled=False):
        assert all(p.numel() == 0 for p in model.parameters())
    with GatheredParameters(model.parameters()):  # a generator
        assert all(p.shape == p.ds_shape for p in model.parameters())
    assert all(p.numel() == 0 for p in model.parameters())


def test_reading_nests_and_forgives():
    run_ranks(WORLD, _reading)


def _modified_by(modifier, dtype):
    """The change reaches the weights of every rank and the masters that training goes on from."""
    rank, _ = rank_and_world()
    engine = _engine(dtype)
    model = engine.module
    with GatheredParameters([model.head.weight, model.head.weight, None], modifier_rank=modifier):
        with torch.no_grad():
            model.head.weight.fill_(0.5 + rank)
    changed = make_model()
    with torch.no_grad():
        changed.head.weight.fill_(0.5 + modifier)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype == "bf16":  # masters of untouched weights keep their fp32 values; those of the head have the written ones
        assert torch.equal(full_parameters(model)["head.weight"], changed.head.weight.bfloat16())
    reference = PlainTrainer(changed, WORLD, adamw, dtypes[dtype])
    for tokens in make_batches(2, WORLD):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []


@each_once({"dtype": ["fp32", "bf16"], "modifier": [0, 1]})
def test_what_the_modifier_writes_is_everybodys(modifier, dtype):
    run_ranks(WORLD, _modified_by, modifier, dtype)


def _nested_modifiers():
    rank, _ = rank_and_world()
    model = _engine().module
    head, norm = model.head.bias, model.layers[0].norm.weight
    with torch.no_grad():
        with GatheredParameters([head, norm], modifier_rank=0):
            head.fill_(1.0 + rank)
            with GatheredParameters([norm], modifier_rank=1):
                norm.fill_(7.0 + rank)
            assert norm.eq(8.0).all()
    values = full_parameters(model)
    assert values["head.bias"].eq(1.0).all() and values["layers.0.norm.weight"].eq(8.0).all()


def test_modifying_contexts_nest():
    run_ranks(WORLD, _nested_modifiers)


def _refused():
    """An edit without a modifier rank is refused; an edit that ends half way is dropped."""
    rank, world = rank_and_world()
    for stage in range(4):
        for live_bytes in ("auto", 1):
            model = make_engine(make_model(), config_of(stage, live_bytes=live_bytes)).module
            expected = {n: p.detach() for n, p in make_model().named_parameters()}
            name = "head.weight"
            head = dict(model.named_parameters())[name]
            with pytest.raises(strata.UsageError, match=f"pass modifier_rank=<.*First: '{name}'"):
                with GatheredParameters([head]), torch.no_grad():
                    head.fill_(9.0)
            if stage == 3 and world > 1:
                assert differences(full_parameters(model), expected) == []
            with pytest.raises(ValueError, match="half way"):
                with GatheredParameters([head], modifier_rank=0), torch.no_grad():
                    head.fill_(9.0)
                    raise ValueError("half way")
            if stage == 3 and world > 1 and live_bytes == 1:
                assert head.numel() == 0 and differences(full_parameters(model), expected) == []
            with GatheredParameters([head]), torch.no_grad():
                with GatheredParameters([head], modifier_rank=0):
                    head.fill_(3.0 + rank)
            assert full_parameters(model)["head.weight"].eq(3.0).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_edit_without_a_modifier_is_an_error_and_one_that_fails_is_lost(world):
    run_ranks(world, _refused)


def _released():
    rank, _ = rank_and_world()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = make_engine(make_model(), config_of(3, zero_optimization=zero))
    model = engine.module
    named = dict(model.named_parameters())
    every = [p for p in named.values() if p.ds_numel]
    train_step(engine, make_batches(1, WORLD)[0][rank])
    with GatheredParameters(every):
        assert all(p.shape == p.ds_shape for p in every)
    assert all(p.numel() == 0 for p in every)
    with GatheredParameters(every, modifier_rank=1):
        pass
    assert all(p.numel() == 0 for p in every)
    weight = model.head.weight  # a read gathers, until the next backward pass is over; the context ends that
    assert weight.numel() == 176
    with GatheredParameters(weight):
        pass
    assert weight.numel() == 0

    def within(*_):
        weight = named["layers.1.up.weight"]
        with GatheredParameters(weight):
            pass
        assert weight.numel() == 512

    hook = model.layers[1].up.register_forward_hook(within)  # a running scope holds it
    train_step(engine, make_batches(1, WORLD)[0][rank])
    hook.remove()


def test_what_was_gathered_is_released_at_the_end_unless_a_scope_uses_it():
    run_ranks(WORLD, _released)


def _saved_by_autograd():
    """The backward of a value that was computed with gathered parameters has them again."""
    rank, _ = rank_and_world()
    engine = _engine()
    head, norm = engine.module.head.weight, dict(engine.module.named_parameters())["layers.0.norm.weight"]
    tokens = make_batches(1, WORLD)[0]
    reference = PlainTrainer(make_model(), WORLD, adamw)

    def loss_with(model, batch, head, norm):
        loss = loss_of(model, batch)
        with GatheredParameters([head, norm]):
            return loss + (head.t() @ head).square().mean() + (norm * norm.detach()).sum()

    def plain_loss(model, batch):
        return loss_with(model, batch, model.head.weight, model.layers[0].norm.weight)

    reference.micro_step(tokens, plain_loss)
    reference.step()
    loss = loss_with(engine, tokens[rank], head, norm)
    assert head.numel() == 0 and norm.numel() == 0
    engine.backward(loss)
    engine.step()
    assert differences(full_parameters(engine.module), reference.values()) == []


def test_what_autograd_saved_of_a_gathered_parameter_is_there_in_backward():
    run_ranks(WORLD, _saved_by_autograd)


def _of_deepspeeds_face():
    rank, world = rank_and_world()
    model = make_engine(make_model(), config_of(3, live_bytes=1)).module
    named, original = dict(model.named_parameters()), dict(make_model().named_parameters())
    assert len({p.ds_id for p in named.values()}) == len(named)
    for name, parameter in named.items():
        assert parameter.ds_shape == original[name].shape and parameter.ds_numel == original[name].numel()
        part = parameter.ds_tensor
        assert part.dim() == 1 and part.ds_numel == part.numel() and part.status.name == "AVAILABLE"
        assert torch.isin(part, original[name].detach()).all()
    head = named["head.weight"]
    for _ in range(2):
        head.all_gather()
        head.all_gather()
        assert head.ds_status.name == "AVAILABLE" and torch.equal(head, original["head.weight"])
        head.partition()
        head.partition()
        assert head.ds_status.name == ("AVAILABLE" if world == 1 else "NOT_AVAILABLE")
    head.all_gather(list(named.values()))
    assert all(p.shape == p.ds_shape for p in named.values())
    with torch.no_grad():
        head.fill_(2.0 + rank)
    head.partition([head], has_been_updated=True)
    head.partition(list(named.values()))
    assert full_parameters(model)["head.weight"].eq(2.0).all()
    whole = make_engine(make_model(), config_of(2)).module
    assert not any(hasattr(p, "ds_id") for p in whole.parameters())
    return {name: p.ds_tensor.numel() for name, p in named.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_managed_parameters_have_deepspeeds_attributes_at_stage_3_alone(world):
    parts = run_ranks(world, _of_deepspeeds_face)
    for name, parameter in make_model().named_parameters():
        assert sum(part[name] for part in parts) == parameter.numel()


def _no_such_rank():
    _, world = rank_and_world()
    strata.zero.Init(module=(built := make_model()))  # without an engine
    for parameter in (_engine().module.head.weight, built.head.weight):
        for wrong in (world, -1):
            match = f"modifier_rank must be a rank of this job, 0 to {world - 1}; got {wrong}"
            with pytest.raises(strata.UsageError, match=match):
                with GatheredParameters(parameter, modifier_rank=wrong):
                    pass


@pytest.mark.parametrize("world", [1, 2])
def test_a_modifier_that_does_not_exist_is_an_error(world):
    run_ranks(world, _no_such_rank)


def _checked():
    from strata.compat.sharding import GatheredParameters as StandIn

    for checks in (False, True):
        zero = {"stage": 3, "enable_sanity_checks": checks}
        model = make_engine(make_model(), config_of(3, zero_optimization=zero, live_bytes=1)).module
        with pytest.raises(strata.UsageError, match="modifier_rank=None") if checks else nullcontext():
            with StandIn([model.head.weight]), torch.no_grad():
                model.head.weight.fill_(9.0)
        assert differences(full_parameters(model), dict(make_model().named_parameters())) == []


def test_sanity_checks_make_an_edit_without_a_modifier_an_error_of_the_stand_in():
    run_ranks(WORLD, _checked)


def _writes_to_released(folder):
    rank, _ = rank_and_world()
    model = make_model()
    told = folder / f"{rank}"
    with errors_into(told):
        engine = make_engine(model, config_of(3, live_bytes=1))
        tokens = make_batches(1, WORLD)[0, rank]
        with torch.no_grad(), GatheredParameters([model.layers[1].up.weight], modifier_rank=0):
            model.layers[1].up.weight.clamp_(-0.01, 0.01)
        train_step(engine, tokens)
        head, bias = model.head.weight, model.layers[0].up.bias
        for write in (lambda: head.clamp_(-0.01, 0.01), lambda: torch.nn.init.ones_(bias), lambda: head.mul_(0.5)):
            with torch.no_grad():
                write()
            train_step(engine, tokens)
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        with torch.no_grad():
            model.layers[0].up.weight.zero_()
        full_parameters(model)  # it gathers the written unit, which changes nothing
        engine.step()
        engine.destroy()
    text = told.read_text()
    expected = {"head.weight": 1, "layers.0.up.bias": 1, "layers.0.up.weight": 1, "layers.1.up.weight": 0}
    for name, times in expected.items():
        assert text.count(f"parameter '{name}' was written to") == times, text


def test_a_write_to_a_released_parameter_is_warned_of_by_its_name(tmp_path):
    run_ranks(WORLD, _writes_to_released, tmp_path)
