"""zero.Init shards models while their constructors run."""

import gc
import weakref

import pytest
import strata
import torch
from comparison import adamw
from devices import ON_GPU, test_device
from hf_models import MODELS
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.model.constructors import open_reads
from strata.zero import GatheredParameters, Init
from test_errors import error_of
from tiny_models import (
    DTYPES,
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

writer = 0  # constructors write other values on each rank: the rank's number, but 0 for the plain model


class Initialised(TinyModel):
    """Its constructor writes to parameters of constructors below it, in the ways that models do."""

    def __init__(self):
        super().__init__()
        self.apply(self._init_weights)
        nn.init.constant_(self.layers[0].up.bias, 0.5 + writer)
        for parameter in self.layers[1].parameters():
            if parameter.dim() > 1:
                nn.init.uniform_(parameter, -0.1, 0.1)
        with torch.no_grad():
            self.layers[2].up.weight.copy_(self.layers[1].up.weight)  # two at a time
            self.one += writer

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02 * (1 + writer))
            module.bias.data.fill_(0.01 * writer)


class Derived(Initialised):
    """One more level, which ties, replaces, and makes modules in unusual ways."""

    def __init__(self, prebuilt):
        super().__init__()
        nn.init.normal_(self.head.weight, 0.0, 0.1 + writer)
        self.head.weight = self.embedding.weight
        self.layers.append(prebuilt)  # built elsewhere
        skipped = nn.utils.skip_init(nn.Linear, 16, 32)
        nn.init.normal_(skipped.weight, 0.0, 0.02 + writer)
        nn.init.zeros_(skipped.bias)
        self.layers[3].up = skipped
        nn.init.constant_(self.layers[3].norm.weight, 1.5 + writer)


def _built(inside):
    global writer
    writer = rank_and_world()[0] if inside else 0
    torch.manual_seed(writer)
    prebuilt = type(make_model().layers[0])()
    torch.manual_seed(100 + writer)
    return Derived(prebuilt)


def _built_plainly(inside):
    return make_model(seed=rank_and_world()[0] if inside else 0)


def _sharded(model):
    sizes = [p.numel() for p in model.parameters() if p.ds_numel > 0]
    return sum(sizes) == (0 if rank_and_world()[1] > 1 else sum(p.ds_numel for p in model.parameters()))


# A constructor draws its own parameters' values on the host, but those for its children's on the training device.
draws_on_the_host = pytest.mark.skipif(ON_GPU, reason="random numbers of GPUs are others than the plain model's")


def _trained(stages, dtype):
    rank, world = rank_and_world()
    build = _built if dtype == "fp32" else _built_plainly  # random numbers differ between dtypes
    for stage in stages:
        config = config_of(stage, dtype, live_bytes=1)
        with Init(config_dict_or_path=config):
            with Init(config_dict_or_path=config):
                model = build(inside=True)
            assert model.layers[0].up.bias.numel() == 32  # read within: gathered on the spot
        assert _sharded(model)
        start = {n: p.detach().to(DTYPES[dtype]) for n, p in build(inside=False).named_parameters()}
        engine = make_engine(model, config)
        assert differences(full_parameters(model), start) == [], f"stage {stage}"
        born = build(inside=False)
        born.load_state_dict({n: v.float() for n, v in start.items()}, strict=False)
        reference = PlainTrainer(born, world, adamw, DTYPES[dtype])
        for tokens in make_batches(2, world):
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
        assert differences(full_parameters(model), reference.values()) == [], f"stage {stage}"
        engine.destroy()


CASES = [(1, range(4), "fp32"), (2, range(4), "fp32"), (2, [3], "bf16"), (3, [3], "fp32")]


@draws_on_the_host
@pytest.mark.parametrize("world, stages, dtype", CASES)
def test_what_constructors_write_counts_on_rank_0(world, stages, dtype):
    run_ranks(world, _trained, stages, dtype)


class Counted(nn.Module):
    """Notes how many modules' parameters are whole while constructors run."""

    made, most = [], 0

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(8))
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        Counted.made += [self, self.up, self.down]
        self.count()

    @staticmethod
    def count():
        whole = sum(any(p is not None and p.numel() for p in dict.values(m._parameters)) for m in Counted.made)
        Counted.most = max(Counted.most, whole)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(4))
        Counted.most_built, Counted.most = Counted.most, 0
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
            Counted.count()


def _never_whole():
    with Init(config_dict_or_path=config_of(3)):
        tower = Tower()
        assert _sharded(tower)
    assert Counted.most_built <= 1 and Counted.most <= 1, (Counted.most_built, Counted.most)
    # A parameter that the script still references stays whole until the constructor is over.
    with Init(config_dict_or_path=config_of(3)):

        class Holding(nn.Module):
            def __init__(self):
                super().__init__()
                self.tower = Tower()
                weight, view = self.tower.blocks[0].up.weight, self.tower.blocks[1].up.weight.data[0]
                for block in self.tower.blocks:
                    nn.init.ones_(block.down.weight)
                weight.data.fill_(2.0)
                view.fill_(3.0)
                del view

        holding = Holding()
        assert _sharded(holding)
    values = full_parameters(make_engine(holding, config_of(3)).module)
    assert values["tower.blocks.0.up.weight"].eq(2.0).all() and values["tower.blocks.1.up.weight"][0].eq(3.0).all()
    assert all(values[f"tower.blocks.{i}.down.weight"].eq(1.0).all() for i in range(4))


@pytest.mark.parametrize("world", [2, 3])
def test_at_most_one_constructors_parameters_are_whole(world):
    run_ranks(world, _never_whole)


def _small_ones():
    rank, world = rank_and_world()
    with Init():
        alone = nn.Linear(4, 4)
        with torch.no_grad():
            alone.bias.fill_(1.0 + rank)  # after the constructor, but within
        skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        late = nn.Sequential()
    outside = nn.Linear(2, 2)
    with Init():

        class Declared(nn.Module):
            def __init__(self):
                super().__init__()
                self.own = nn.Parameter(torch.full((5,), 1.0 + rank))
                self.steps = nn.Parameter(torch.arange(3) + rank, requires_grad=False)
                self.inner = nn.Linear(5, 5)

        declared = Declared()
        late = nn.Sequential(nn.Linear(2, 2))
        late.append(outside)
        clones = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)  # deep copies of a layer
    Init(module=(given := make_model()), dtype=torch.bfloat16)
    models = [alone, skipped, declared, late, clones, given]
    assert all(_sharded(model) for model in models)
    ids = [p.ds_id for model in models for p in model.parameters()]
    assert len(set(ids)) == len(ids)
    with GatheredParameters([*alone.parameters(), *declared.parameters(), given.head.weight]):
        assert alone.bias.eq(1.0).all() and declared.own.eq(1.0).all() and declared.steps.tolist() == [0, 1, 2]
        assert torch.equal(given.head.weight, make_model().head.weight.bfloat16())
    with GatheredParameters(list(clones.parameters())):
        first, second = (dict(layer.named_parameters()) for layer in clones.layers)
        assert differences(first, second) == [] and first["linear1.weight"].shape == (8, 4)
    with pytest.raises(strata.UsageError, match="pass modifier_rank=<"):
        with GatheredParameters(alone.weight), torch.no_grad():
            alone.weight.zero_()
    weight = dict.__getitem__(alone._parameters, "weight")
    weight.all_gather()
    assert weight.ds_status.name == "AVAILABLE" and weight.shape == weight.ds_shape == (4, 4)
    weight.partition()
    assert weight.ds_status.name == ("AVAILABLE" if world == 1 else "NOT_AVAILABLE")
    with Init(enabled=False):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")
    return ids, weight.ds_tensor.numel()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_modules_of_every_kind_are_sharded(world):
    told = run_ranks(world, _small_ones)
    assert all(ids == told[0][0] for ids, _ in told) and sum(part for _, part in told) == 16


class Tied(nn.Module):
    def __init__(self, owners):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        owners.append(weakref.ref(getattr(self.head.weight, "_strata_core", self.head.weight)))
        self.head.weight = self.embedding.weight


def _released_transformers():
    rank, _ = rank_and_world()
    with Init():
        torch.manual_seed(rank)
        model = MODELS["qwen3"].build()
    assert _sharded(model)
    torch.manual_seed(0)
    plain = dict(MODELS["qwen3"].build().named_parameters())
    assert differences(full_parameters(model), {name: p.detach() for name, p in plain.items()}) == []


@draws_on_the_host
def test_a_model_of_transformers_is_initialised_as_rank_0_would():
    run_ranks(2, _released_transformers)


def _devices():
    owners = []
    with torch.device("cpu"), Init():
        tied = Tied(owners)
    gc.collect()
    assert owners[0]() is None  # a parameter that tying has replaced is freed
    assert _sharded(tied) and tied.head.weight is tied.embedding.weight
    with Init():
        first = nn.Linear(2, 2)
        with torch.device("meta"):
            second = nn.Linear(2, 2)
        model = nn.Sequential(first, second)  # submodules on meta that come late
    assert _sharded(first) and second.weight.is_meta
    told = error_of(make_engine, model, config_of(3))
    second.to_empty(device=test_device())
    nn.init.ones_(second.weight)
    assert full_parameters(make_engine(model, config_of(3)).module)["1.weight"].eq(1.0).all()
    return told


@pytest.mark.parametrize("world", [1, 2, 3])
def test_devices_and_ties_within(world):
    for message in run_ranks(world, _devices):
        assert message.startswith("ConfigError") and "meta" in message, message


def _wrong():
    plain = nn.Linear.__init__, nn.Module.__init__, nn.Module.__dict__.get("__init_subclass__")

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            nn.init.ones_(self.inner.weight)
            raise ValueError("half way")

    with Init():
        for _ in range(2):
            with pytest.raises(ValueError, match="half way"):
                Failing()
        good = nn.Linear(2, 2)
    assert _sharded(good)
    with pytest.raises(ValueError, match="half way"):
        with Init():
            Failing()
    assert (nn.Linear.__init__, nn.Module.__init__, nn.Module.__dict__.get("__init_subclass__")) == plain
    return {
        "module": error_of(Init, module=3),
        "dtype": error_of(Init, dtype=torch.float64),
        "config": error_of(Init, config_dict_or_path={"zero_optimization": {"stage": 7}}),
    }


def _no_room_at_the_end():
    """A deferred tensor that is in use when the constructors are over, and for which there is no memory, cannot be
    materialized."""
    plain = nn.Linear.__init__, nn.Module.__init__, nn.Module.__dict__.get("__init_subclass__")
    kept = []

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            kept.append(torch.empty(1 << 46))

    with pytest.raises(strata.OutOfMemoryError, match="no address range|in use when the constructors"):
        with Init(config_dict_or_path={"strata": {"init": {"replay_above": 100}}}):
            Keeping()
    assert (nn.Linear.__init__, nn.Module.__init__, nn.Module.__dict__.get("__init_subclass__")) == plain
    assert open_reads() is None
    assert not hasattr(nn.Linear(20, 20).weight, "ds_numel")
    with Init(config_dict_or_path={"strata": {"init": {"replay_above": 100}}}):
        good = nn.Linear(20, 20)
    assert _sharded(good)


@pytest.mark.parametrize("world", [1, 2])
def test_a_context_that_cannot_end_well_ends(world):
    run_ranks(world, _no_room_at_the_end)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_constructors_that_fail_and_bad_input(world):
    for told in run_ranks(world, _wrong):
        assert told["module"] == "UsageError: zero.Init(module=...) takes a torch.nn.Module; found int"
        assert "found torch.float64" in told["dtype"] and told["config"].startswith("ConfigError")
