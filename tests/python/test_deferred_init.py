"""Deferred initialization: parameters are built without memory within zero.Init, and replayed chunk by chunk."""

import logging
import math

import pytest
import torch
from devices import ON_GPU, needs_a_gpu_each
from hf_models import MODELS
from ranks import run_ranks
from replayed_models import compare_worlds, config_of_birth, unlike, values_under_init
from strata import deferred_init
from strata.deferred_init import DeferredInit
from strata.zero import GatheredParameters, Init
from test_errors import error_of
from tiny_models import differences, full_parameters, make_engine, rank_and_world
from torch import nn


class Chains(nn.Module):
    """Constructors change their own parameters and those of other modules, element by element."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(48, 40)
        self.embedding = nn.Embedding(50, 24, padding_idx=3)
        self.truncated = nn.Parameter(torch.empty(300, 11))
        nn.init.trunc_normal_(self.truncated, mean=0.1, std=0.5, a=-0.4, b=0.6)
        self.scaled = nn.Parameter(torch.randn(64, 32) * 0.02 + 1)
        self.halves = nn.Parameter(torch.zeros(20, 30, dtype=torch.bfloat16).normal_(0, 3).div_(3))
        self.full = nn.Parameter(torch.full((33,), 2.5))
        self.copied = nn.Parameter(torch.empty(64, 32))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        nn.init.kaiming_normal_(self.layers[0].weight)
        with torch.no_grad():
            self.embedding.weight[3].fill_(0.5)
            self.linear.weight[:, 4:9] = -1
            self.linear.weight.data[2:5].uniform_(5, 6)
            self.copied.copy_(self.scaled)
            self.layers[1].weight -= 1
            self.layers[1].bias.zero_().add_(1, alpha=3)
            self.full.clamp_(max=2.0)
            self.halves.t()[0] = 7.0


def _is_as_told(values):
    """Asserts the chains' values, by torch's promises for each operation."""
    linear, bound = values["linear.weight"], 1 / math.sqrt(48)
    assert linear[:, 4:9][:2].eq(-1).all() and linear[5:, :4].abs().max() <= bound
    assert linear[2:5].ge(5).all() and linear[2:5].lt(6).all() and len(linear[2:5].unique()) > 100
    embedding = values["embedding.weight"]
    assert embedding[3].eq(0.5).all() and 0.9 < embedding[4:].std() < 1.1
    truncated = values["truncated"]
    assert truncated.min() >= -0.4 and truncated.max() <= 0.6
    plain = torch.empty(300, 11)
    nn.init.trunc_normal_(plain, mean=0.1, std=0.5, a=-0.4, b=0.6)
    assert unlike(truncated, plain) == ""
    assert abs(values["scaled"].mean() - 1) < 0.002 and 0.018 < values["scaled"].std() < 0.022
    assert torch.equal(values["copied"], values["scaled"])
    assert values["halves"].dtype == torch.bfloat16 and values["halves"][:, 0].eq(7).all()
    assert 0.9 < values["halves"][:, 1:].float().std() < 1.1
    assert values["full"].eq(2.0).all() and values["layers.1.bias"].eq(3.0).all()
    assert values["layers.1.weight"].le(-0.75).all() and values["layers.1.weight"].ge(-1.25).all()
    assert 0.25 < values["layers.0.weight"].std() < 0.46


def _chains():
    rank, _ = rank_and_world()
    found = [values_under_init(Chains, seed=11 * rank, piece=piece) for piece in ("100", "8MiB")]
    assert differences(*found) == []
    _is_as_told(found[0])
    other = values_under_init(Chains, seed=1 + 11 * rank)
    assert set(differences(found[0], other)) == {n for n in other if n not in ("full", "layers.1.bias")}
    torch.manual_seed(11 * rank)
    with Init(config_dict_or_path=config_of_birth()):
        first, second = Chains(), Chains()  # one after the other they differ
    assert "linear.weight" in differences(full_parameters(first), full_parameters(second))
    assert differences(full_parameters(first), found[0]) == []
    return found[0]


def test_values_depend_neither_on_ranks_nor_on_pieces():
    """All ranks have the values of rank 0's seed."""
    found = [values for world in (1, 2, 3) for values in run_ranks(world, _chains)]
    for values in found[1:]:
        assert differences(values, found[0]) == []


class Large(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.small = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.empty(rows, columns))
        nn.init.normal_(self.weight, 0.0, 0.02)

    def forward(self, x):
        return self.small(x).sum() + self.weight[0].sum()


MIB = 1 << 20


def _peaks():
    """The peaks of memory while 64 MiB are constructed, and while an engine adopts them."""
    _, world = rank_and_world()
    config = config_of_birth("1MiB", replay_above=1 << 20)
    torch.manual_seed(0)
    plain = nn.Linear(16, 16).weight.detach().clone()
    torch.manual_seed(0)
    with Init(config_dict_or_path=config):
        model = Large(4096, 4096)
    assert differences({"w": full_parameters(model.small)["weight"]}, {"w": plain}) == []  # as torch builds it
    weight = dict.__getitem__(model._parameters, "weight")
    report = weight._strata_core.memory_report()
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine = make_engine(model, config)
    report = {"init": report, "engine": engine.memory_report()}
    with GatheredParameters([model.weight]):
        assert 0.0199 < model.weight.std() < 0.0201
    engine.destroy()
    return {who: {place: one[place][1] for place in one} for who, one in report.items()}


@pytest.mark.skipif(ON_GPU, reason="bench/bench_deferred_init.py measures it there")
@pytest.mark.parametrize("world", [2, 3])
def test_a_parameter_is_whole_nowhere(world):
    """No rank holds more than its shard and two chunks: neither while the constructor runs nor while an engine, whose
    shards begin at other elements, adopts the parameter."""
    for peaks in run_ranks(world, _peaks):
        shard = 64 * MIB / world + 4 * 4096  # pages, of the small ones, too
        init = peaks["init"]
        assert init["device", "weights"] <= shard and init["device", "gathered weights"] <= 2 * 4096
        assert init["host", "staging"] <= 2 * MIB and init["device", "staging"] <= MIB
        engine = peaks["engine"]
        assert engine["device", "staging"] <= MIB and engine["device", "gathered weights"] <= 2 * 4096


def _placed(folder):
    found = []
    for place in ("none", "cpu", "nvme"):
        param = {} if place == "none" else {"offload_param": {"device": place, "nvme_path": str(folder)}}
        found.append(values_under_init(Chains, seed=3, **param))
    return [differences(values, found[0]) for values in found]


@needs_a_gpu_each
def test_shards_on_the_host_and_on_drives_have_the_same_values(tmp_path):
    assert run_ranks(2, _placed, tmp_path) == [[[], [], []]] * 2


def _taken_over():
    found = []
    for piece in ("16", "8MiB"):  # a value larger than 32 chunks is sent in chunks, the others are gathered
        config = config_of_birth(piece) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        torch.manual_seed(5)
        with Init(config_dict_or_path=config):
            model = nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 17), nn.Linear(17, 3))
        born = full_parameters(model)
        engine = make_engine(model, config)
        found += [born, full_parameters(engine.module)]
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_an_engine_takes_values_over_in_pieces_and_at_once(world):
    for found in run_ranks(world, _taken_over):
        assert [differences(values, found[0]) for values in found[1:]] == [[]] * 3


class Rotations(nn.Module):
    """Its constructor computes values that depend on whole tensors, not on single elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.whole = []  # of the layers before, those that are not sharded yet
        for i, layer in enumerate(self.layers):
            nn.init.orthogonal_(layer.weight)
            before = [dict.__getitem__(self.layers[k]._parameters, "weight") for k in range(i)]
            self.whole.append(sum("ds_id" not in weight.__dict__ for weight in before))
            del before
        self.read = nn.Parameter(torch.ones(40))
        self.read.data *= float(self.read.detach().numpy().sum())
        self.list = nn.Parameter(torch.full((3,), sum(self.read.tolist())))
        self.register_buffer("mask", torch.ones(9, 9).tril())
        self.noise = torch.randn(20)  # neither a parameter nor a buffer
        self.rows = nn.Parameter(torch.randn(6, 5)[1:3])
        self.drawn = nn.Parameter(torch.empty(50).exponential_())


def _not_replayable():
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("strata").addHandler(handler)
    kept = []

    def build():
        kept.append(Rotations())
        return kept[-1]

    values = values_under_init(build, seed=rank_and_world()[0])
    logging.getLogger("strata").removeHandler(handler)
    model = kept[0]
    assert not any(model.whole)
    for i in range(4):
        q = values[f"layers.{i}.weight"]
        assert torch.allclose(q @ q.T, torch.eye(32), atol=1e-5)
    assert values["read"].eq(40.0).all() and values["list"].eq(1600.0).all()
    assert model.mask.sum() == 45 and values["rows"].std() > 0 and values["drawn"].gt(0).all()
    assert model.noise.std() > 0.3  # a tensor that is still referenced is materialized
    if rank_and_world()[0] > 0:
        assert told == []
        return values
    orthogonal = [text for text in told if "linalg_qr" in text]
    assert len(orthogonal) == 1 and "Rotations's constructor" in orthogonal[0] and "32x32" in orthogonal[0]
    drawn = [text for text in told if "exponential_" in text]
    assert len(drawn) == 1 and "other numbers than without zero.Init" in drawn[0]
    return values


def test_what_is_not_elementwise_is_made_real_and_named_once():
    found = [values for world in (1, 2, 3) for values in run_ranks(world, _not_replayable)]
    for values in found[1:]:
        assert differences(values, found[0]) == []


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        raise ValueError("half way")


def _no_room():
    """A piece for which no rank has room, once the first of two matrices is sharded."""
    kept = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            kept.append(self)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    made, together = DeferredInit._make_core, deferred_init._MOST_AT_ONCE
    try:
        deferred_init._MOST_AT_ONCE = 1  # element: each matrix by itself
        DeferredInit._make_core = lambda own, *arguments: (
            made(own, *arguments) if own._count == 0 else own._config.no_room)
        with pytest.raises(AttributeError):
            with Init(config_dict_or_path=config_of_birth()):
                Two()
    finally:
        DeferredInit._make_core, deferred_init._MOST_AT_ONCE = made, together
    parameters = list(kept[0].parameters())
    assert [p.numel() for p in parameters] == [256, 16] * 2
    assert not any("_strata_core" in p.__dict__ or "ds_id" in p.__dict__ for p in parameters)

    def build():
        with Init(config_dict_or_path=config_of_birth("4096TiB")):
            return Two()

    return error_of(build), [p.numel() for p in kept[1].parameters()]


def _bad():
    def build(config):
        with Init(config_dict_or_path=config):
            return Failing()

    told = {
        "half way": error_of(build, config_of_birth()),
        "no piece": error_of(Init, config_dict_or_path=config_of_birth(0)),
        "threshold": error_of(Init, config_dict_or_path=config_of_birth(replay_above=-1)),
        "room": _no_room() if rank_and_world()[1] > 1 else None,
    }
    with pytest.raises(RuntimeError, match="std >= 0"):
        values_under_init(Wrong, seed=0)
    values = values_under_init(Chains, seed=0)
    _is_as_told(values)
    return told


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(10).normal_(0, -1))


@pytest.mark.parametrize("world", [1, 2])
def test_bad_input_leaves_nothing_behind(world):
    for told in run_ranks(world, _bad):
        assert told["half way"] == "ValueError: half way"
        assert "stage3_partition_stream_chunk_size" in told["no piece"] and told["no piece"].startswith("ConfigError")
        assert "strata.init.replay_above" in told["threshold"]
        if world > 1:
            message, sizes = told["room"]
            assert message.startswith("OutOfMemoryError") and sizes == [256, 16] * 2, message


def test_models_of_transformers_have_the_same_values_on_any_number_of_ranks():
    compare_worlds({name: MODELS[name].build for name in ("qwen3_moe", "gpt2", "t5", "mamba")})
