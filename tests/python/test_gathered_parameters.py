"""zero.GatheredParameters and zero.Init, and how released parameters look."""

import copy
import pickle

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.zero import GatheredParameters
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
    if dtype == "bf16":  # the masters of what was not touched are fp32; those of the head are what was written
        assert torch.equal(full_parameters(model)["head.weight"], changed.head.weight.bfloat16())
    reference = PlainTrainer(changed, WORLD, adamw, dtypes[dtype])
    for tokens in make_batches(2, WORLD):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("modifier", [0, 1])
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


def _lost(live_bytes):
    model, original = _engine(live_bytes=live_bytes).module, make_model()
    expected = {n: p.detach() for n, p in original.named_parameters()}
    with GatheredParameters([model.head.weight]), torch.no_grad():
        model.head.weight.fill_(9.0)
    assert differences(full_parameters(model), expected) == []
    with pytest.raises(ValueError, match="half way"):
        with GatheredParameters([model.head.weight], modifier_rank=0), torch.no_grad():
            model.head.weight.fill_(9.0)
            raise ValueError("half way")
    assert differences(full_parameters(model), expected) == []


@pytest.mark.parametrize("live_bytes", ["auto", 1])
def test_changes_are_lost_without_a_modifier_and_after_an_exception(live_bytes):
    run_ranks(WORLD, _lost, live_bytes)


def _no_such_rank():
    model = _engine().module
    with pytest.raises(strata.UsageError, match="modifier_rank must be a rank of this job, 0 to 1; got 2"):
        with GatheredParameters(model.head.weight, modifier_rank=2):
            pass


def test_a_modifier_that_does_not_exist_is_an_error():
    run_ranks(WORLD, _no_such_rank)


def _born_in_init(dtype, nested):
    rank, _ = rank_and_world()
    config = config_of(3, dtype, live_bytes=1)
    torch.manual_seed(0)
    with strata.zero.Init(config_dict_or_path=config):
        if nested:
            with strata.zero.Init(config_dict_or_path=config):
                model = TinyModel()
        else:
            model = TinyModel()
        with torch.no_grad():
            assert model.layers[0].up.bias.numel() == 32  # read within: gathered on the spot
    sizes = [p.numel() for p in model.parameters() if p.ds_status.name == "NOT_AVAILABLE"]
    assert sizes and not any(sizes)
    original = make_model()
    engine = make_engine(model, config)
    target = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    start = {n: p.detach().to(target) for n, p in original.named_parameters()}
    assert differences(full_parameters(model), start) == []
    born = make_model()
    born.load_state_dict({n: v.float() for n, v in start.items()})
    reference = PlainTrainer(born, WORLD, adamw, target)
    for tokens in make_batches(2, WORLD):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_models_may_be_built_sharded(dtype, nested):
    run_ranks(WORLD, _born_in_init, dtype, nested)


def _disabled_init():
    with strata.zero.Init(enabled=False):
        model = make_model()
    assert not any(hasattr(p, "ds_id") for p in model.parameters())
    outside = make_model()
    assert type(outside.head.weight) is torch.nn.Parameter
    strata.zero.Init(module=outside, dtype=torch.float32)
    assert outside.head.weight.ds_shape == torch.Size([11, 16])
    engine = make_engine(outside, config_of(3))
    assert differences(full_parameters(engine.module), {n: p.detach() for n, p in model.named_parameters()}) == []


def test_init_may_be_disabled_or_given_a_module():
    run_ranks(WORLD, _disabled_init)
