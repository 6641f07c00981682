"""A script gives parameters other memory (``p.data = tensor`` and its kin), or makes parameters of them. The engine
uses the written values, or raises an error that says how to write them."""

import pytest
import torch
from comparison import adamw
from devices import ON_GPU, test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.zero import GatheredParameters, Init
from test_errors import error_of
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
from torch import nn
from torch.nn.utils import parametrizations, parameters_to_vector, vector_to_parameters
from training_states import errors_into


class _Pair:
    """An engine and plain torch, both started from the plain model that ``write`` has changed."""

    def __init__(self, stage, write=lambda model: None):
        self.rank, self.world = rank_and_world()
        plain = make_model()
        with torch.no_grad():
            write(plain)
        self.reference = PlainTrainer(plain, self.world, adamw)
        self.engine = make_engine(make_model(), config_of(stage, live_bytes=1))
        self.named = dict(self.engine.module.named_parameters())
        self.batches = iter(make_batches(9, self.world))

    def train(self):
        tokens = next(self.batches)
        self.reference.micro_step(tokens, loss_of)
        self.reference.step()
        train_step(self.engine, tokens[self.rank])
        assert differences(full_parameters(self.engine.module), self.reference.values()) == []


def _write(model):
    model.head.weight.fill_(0.05)
    model.head.bias.copy_(torch.arange(11.0))
    model.layers[0].up.bias.fill_(0.25)


def _that_counts():
    for stage in range(4):
        pair = _Pair(stage, _write)
        head, bias, other = (pair.named[n] for n in ("head.weight", "head.bias", "layers.0.up.bias"))
        with GatheredParameters([head, bias, other], modifier_rank=0), torch.no_grad():
            head.data = torch.full_like(head, 0.05 * (1 + pair.rank))
            vector_to_parameters(torch.arange(11.0, device=bias.device) + pair.rank, [bias])
            if pair.rank == 0:
                other.set_(torch.full_like(other, 0.25))
        pair.train()
        pair.train()
        if stage < 3 or pair.world == 1:  # memory of one's own with the same values changes nothing
            vector_to_parameters(parameters_to_vector(pair.engine.module.parameters()), pair.engine.module.parameters())
        pair.train()
        pair.engine.destroy()


def _that_does_not(folder):
    for stage in range(4):
        pair = _Pair(stage)
        name = "head.weight"
        head, engine = pair.named[name], pair.engine
        tokens = make_batches(1, pair.world)[0][pair.rank]

        def assign(shape=(11, 16), dtype=torch.float32, head=head):
            head.data = torch.ones(shape, dtype=dtype, device=test_device())

        pair.train()
        def set_(head=head):
            with torch.no_grad():
                head.set_(torch.ones((11, 16), device=test_device()))

        ways = (assign, set_, lambda: assign(dtype=torch.float64), assign)  # torch makes new nodes for two of them
        for call, change in zip((lambda: engine(tokens), lambda: engine.module(tokens), engine.eval().save_pretrained,
                                 engine.save_checkpoint), ways):
            change()
            where = (folder,) if call in (engine.save_pretrained, engine.save_checkpoint) else ()
            told = error_of(call, *where)
            assert told.startswith("UsageError") and f"'{name}'" in told and "modifier_rank=0" in told, told
        engine.train()
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        set_()
        assert f"'{name}'" in error_of(engine.step)
        engine.step()
        pair.reference.micro_step(make_batches(1, pair.world)[0], loss_of)
        pair.reference.step()
        assert differences(full_parameters(engine.module), pair.reference.values()) == []

        def within(modifier, **how):
            with GatheredParameters([head], modifier_rank=modifier):
                assign(**how)

        assert f"pass modifier_rank=<the rank whose changes shall be everybody's>, or change a copy. First: '{name}'" \
            in error_of(within, None)
        for how, found in (({"shape": (3,)}, "found Float 3"), ({"dtype": torch.float64}, "found Double 11x16")):
            told = error_of(within, 0, **how)
            assert f"'{name}'" in told and "wanted Float 11x16" in told and found in told, told
        engine.destroy()
        pair = _Pair(stage)
        head, engine = pair.named[name], pair.engine
        with pytest.raises(ValueError, match="half way"), GatheredParameters([head], modifier_rank=0):
            assign(head=head)
            raise ValueError("half way")
        pair.train()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_an_assignment_counts_where_others_do_and_is_an_error_elsewhere(world, tmp_path):
    run_ranks(world, _that_counts)
    run_ranks(world, _that_does_not, str(tmp_path))


class Assigning(nn.Module):
    """Its constructor writes to its children as plain torch lets it."""

    def __init__(self, rank):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.weight.data = torch.full((4, 4), 2.0 + rank)
        vector_to_parameters(torch.arange(4.0) + rank, [self.inner.bias])
        self.rounded = nn.Linear(4, 4).bfloat16().float()
        self.norm = parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.alias = nn.Parameter(self.rounded.weight)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4).bfloat16()


def _in_constructors():
    rank, world = rank_and_world()
    for stage in (0, 3):
        torch.manual_seed(rank)
        with Init(config_dict_or_path=config_of(stage)):
            model = Assigning(rank)
        torch.manual_seed(0)
        plain = Assigning(0)
        values = full_parameters(model)
        assert differences(values, {n: p.detach() for n, p in plain.named_parameters()}) == []
        assert type(model.alias) is type(model.inner.weight) and model.alias.requires_grad
        if rank == 0:
            buffers = dict(plain.named_buffers())
            assert all(torch.equal(b.cpu(), buffers[n]) for n, b in model.named_buffers())
    with Init(dtype=torch.bfloat16):
        model = Half()
    assert model.inner.weight.dtype == torch.bfloat16
    with Init():
        told = error_of(Half) if world > 1 else ""
        model = TinyModel()
    assert world == 1 or "wanted Float 4x4, found BFloat16 4x4" in told, told
    named = dict(model.named_parameters())
    named["head.bias"].data = torch.zeros(11, device=test_device())  # after the context
    if world > 1:
        assert "was given other memory" in error_of(make_engine, model, config_of(3))
    else:
        assert full_parameters(make_engine(model, config_of(3)).module)["head.bias"].eq(0.0).all()


@pytest.mark.skipif(ON_GPU, reason="random numbers of GPUs are others than the plain model's")
@pytest.mark.parametrize("world", [1, 2])
def test_what_constructors_assign_counts_on_rank_0(world):
    run_ranks(world, _in_constructors)


def _parameters_of_parameters():
    model = make_engine(make_model(), config_of(3)).module
    with GatheredParameters(list(model.parameters())):
        for requires in (True, False):
            twin = nn.Parameter(model.head.weight, requires)
            assert type(twin) is nn.Parameter and twin.requires_grad is requires and not hasattr(twin, "ds_id")
            assert twin.data_ptr() == model.head.weight.data_ptr() and twin.is_leaf
        detached = model.head.weight.detach()
        assert type(detached) is torch.Tensor and not isinstance(detached, nn.Parameter)
    assert isinstance(model.head.weight, nn.Parameter)


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_can_be_made_of_a_managed_one(world):
    run_ranks(world, _parameters_of_parameters)


def _converted(folder):
    """Converts embeddings and norms as trainers do; the values then are in other memory."""
    rank, world = rank_and_world()
    config = config_of(3, "bf16", live_bytes=1)
    for number, born in enumerate((True, False)):
        with Init(config_dict_or_path=config, enabled=born):
            model = make_model()
        values = {name: value.float() for name, value in full_parameters(model).items()}
        plain = make_model()
        plain.load_state_dict(values)
        reference = PlainTrainer(plain, world, adamw, torch.bfloat16)
        told = folder / f"{rank}-{number}"
        with errors_into(told):
            if not born:
                engine = make_engine(model, config)
            model.embedding.to(torch.float32)
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.to(torch.float32)
            if born:
                engine = make_engine(model, config)
            for tokens in make_batches(3, world):
                train_step(engine, tokens[rank])
                reference.micro_step(tokens, loss_of)
                reference.step()
                assert differences(full_parameters(model), reference.values()) == [], born
        if world > 1:  # said once in a process
            times = 1 if rank == 0 and number == 0 else 0
            assert told.read_text().count("was converted") == times, (born, told.read_text())
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_released_parameter_that_is_converted_keeps_the_configurations_dtype(world, tmp_path):
    run_ranks(world, _converted, tmp_path)
