"""Optimizer states in 8 bits: from the configuration and from objects of bitsandbytes and torchao, at every stage and
place, through checkpoints and ``safe_get``, against the formulas."""

import math
import sys
import types

import pytest
import strata
import torch
from devices import test_device
from ranks import run_ranks
from strata.ops.adam import DeepSpeedCPUAdam
from tiled_models import batches_of, make_tiled, tiled_config
from tiled_models import loss_of as tiled_loss
from tiny_models import (
    config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world, train_step,
)
from torch import nn

VOCABULARY = 11


class Model(nn.Module):
    """Weights of 4096 elements and more, of 4095 and less, of no multiple of 256, and an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 400)
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(2))
        self.odd = nn.Parameter(torch.linspace(-1, 1, 4097))
        self.short = nn.Parameter(torch.linspace(-1, 1, 4095))
        self.head = nn.Linear(400, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return self.head(hidden) * (1 + self.odd.square().mean() + self.short.square().mean())


OPTIMIZERS = {
    "AdamW8bit": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "Lion8bit": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
}
PLACES = {
    "device": {},
    "host": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def _config(stage, dtype, name="AdamW8bit", place="device", **more):
    where = PLACES.get(place)  # or a folder
    if where is None:
        where = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": place}}}
    config = config_of(stage, dtype, optimizer=False, clipping=1.0, **where, **more)
    return config | {"optimizer": {"type": name, "params": OPTIMIZERS[name]}}


def _trained(config, steps, micro=6, **more):
    """An engine after some steps, whose ranks together take the same rows whatever their number."""
    rank, world = rank_and_world()
    torch.manual_seed(0)
    engine = make_engine(Model(), config | {"train_micro_batch_size_per_gpu": micro // world}, **more)
    _train(engine, steps)
    return engine


def _train(engine, steps, first=0):
    rank, world = rank_and_world()
    batches = make_batches(first + steps, 1, samples=6)[first:, 0]
    for tokens in batches:
        train_step(engine, tokens[rank :: world])


def _states(engine):
    found = full_parameters(engine.module)
    for name, parameter in engine.module.named_parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            try:
                found[f"{state} {name}"] = strata.utils.safe_get_full_optimizer_state(parameter, state)
            except strata.UsageError as error:
                if "found are exp_avg" not in str(error):
                    raise
    return found


def _dynamic_map(signed):
    """The values as the libraries make them."""
    values = [0.0, 1.0]
    for i in range(7):
        items = 2 ** (i + (0 if signed else 1)) + 1
        bounds = torch.linspace(0.1, 1, items, dtype=torch.float64)
        means = (10 ** (i - 6) * (bounds[:-1] + bounds[1:]) / 2).tolist()
        values += means + ([-m for m in means] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def _rounded(values, signed):
    """Blocks of 256 of a whole parameter through codes of 8 bits and back."""
    table, out = _dynamic_map(signed).to(values.device), torch.empty_like(values)
    for begin in range(0, values.numel(), 256):
        block = values[begin : begin + 256].double()
        scale = block.abs().max()
        if scale == 0:
            out[begin : begin + 256] = 0
            continue
        codes = (block / scale).unsqueeze(1).sub(table).abs().argmin(1)
        if not signed:
            codes = torch.where((block > 0) & (codes == 0), 1, codes)
        out[begin : begin + 256] = (table[codes] * scale).float()
    return out


class Plain(torch.optim.Optimizer):
    """AdamW with its states in 8 bits, in plain torch; ``wide``: ids of parameters with fp32 states."""

    def __init__(self, params, wide, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8):
        self.wide, self.steps = wide, 0
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state, gradient = self.state[p], p.grad.reshape(-1)
                m = state.get("m", torch.zeros_like(gradient)).lerp(gradient, 1 - beta1)
                v = state.get("v", torch.zeros_like(gradient)) * beta2 + (1 - beta2) * gradient * gradient
                root = v.sqrt() / math.sqrt(1 - beta2**self.steps) + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((group["lr"] / (1 - beta1**self.steps) * m / root).view_as(p))
                narrow = id(p) not in self.wide
                state["m"], state["v"] = (_rounded(m, True), _rounded(v, False)) if narrow else (m, v)


def _against_plain_torch():
    engine = _trained(_config(0, "fp32"), 0)
    torch.manual_seed(0)
    model = Model().to(test_device())
    wide = {id(p) for name, p in model.named_parameters() if "embedding" in name or p.numel() < 4096}
    optimizer = Plain(model.parameters(), wide)
    for step in range(6):
        _train(engine, 1, step)
        loss = loss_of(model, make_batches(step + 1, 1, samples=6)[step, 0])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ours = _states(engine)
    for name, p in model.named_parameters():
        m = optimizer.state[p]["m"].view_as(p)
        # A code beside an edge may go to its other side, which moves the next updates of that element.
        for found, expected in ((ours[name], p.detach()), (ours[f"exp_avg {name}"], m)):
            assert (found - expected).abs().max() < 1e-3, name
            close = (found - expected).abs() <= 1e-4 * expected.abs() + 1e-9
            assert close.float().mean() > 0.99, name
    engine.destroy()


def test_it_is_adamw_with_rounded_states():
    run_ranks(1, _against_plain_torch)


def _everywhere(name, dtype, folder):
    """{case: bits of weights and states} of this number of ranks."""
    found = {}
    for stage, place in ((0, "device"), (2, "host"), (3, "device"), (3, "host"), (3, folder)):
        engine = _trained(_config(stage, dtype, name, place), 3)
        found[stage, place] = _states(engine)
        engine.destroy()
    first = next(iter(found.values()))
    for case, values in found.items():
        assert differences(values, first) == [], case


@pytest.mark.parametrize(("world", "name", "dtype"), [(1, "AdamW8bit", "bf16"), (2, "AdamW8bit", "fp32"),
                                                      (3, "Lion8bit", "bf16"), (2, "AdamW8bit", "bf16")])
def test_stages_and_places_have_the_same_bits(world, name, dtype, tmp_path):
    run_ranks(world, _everywhere, name, dtype, str(tmp_path))


def _saved(folder):
    engine = _trained(_config(3, "bf16"), 3)
    engine.save_checkpoint(str(folder))
    torch.save(_states(engine), folder / "states.pt")
    _train(engine, 2, 3)
    torch.save(_states(engine), folder / "later.pt")
    engine.destroy()


def _loaded(folder, stage, place, same_world):
    engine = _trained(_config(stage, "bf16", place=place), 0)
    engine.load_checkpoint(str(folder))
    assert differences(_states(engine), torch.load(folder / "states.pt")) == []
    _train(engine, 2, 3)
    if same_world:
        assert differences(_states(engine), torch.load(folder / "later.pt")) == []
    engine.destroy()


def test_checkpoints_have_codes_for_any_number_of_ranks(tmp_path):
    run_ranks(3, _saved, tmp_path)
    run_ranks(3, _loaded, tmp_path, 3, "device", True)
    run_ranks(2, _loaded, tmp_path, 2, "host", False)
    run_ranks(1, _loaded, tmp_path, 0, "device", False)


def _other_forms(folder, from_8_bits):
    wide = _config(3, "bf16")
    wide["optimizer"] = {"type": "AdamW", "params": OPTIMIZERS["AdamW8bit"]}
    narrow = wide | {"strata": {"optimizer_states": "8bit"}}
    engine = _trained(narrow if from_8_bits else wide, 2)
    engine.save_checkpoint(str(folder))
    saved = _states(engine)
    engine.destroy()
    engine = _trained(wide if from_8_bits else narrow, 0)
    engine.load_checkpoint(str(folder))
    for name, found in _states(engine).items():
        state, _, parameter = name.rpartition(" ")
        if state and not from_8_bits and "embedding" not in name and found.numel() >= 4096:
            expected = _rounded(saved[name].reshape(-1), state == "exp_avg").view_as(found)
            assert ((found - expected).abs() <= 1e-6 * expected.abs()).float().mean() > 0.99, name
        else:
            assert torch.equal(found, saved[name]), name
    _train(engine, 1, 2)
    engine.destroy()


@pytest.mark.parametrize("from_8_bits", [True, False])
def test_numbers_become_codes_when_they_are_loaded_and_back(tmp_path, from_8_bits):
    run_ranks(2, _other_forms, tmp_path, from_8_bits)


def _by_hand():
    engine = _trained(_config(3, "bf16"), 2)
    weight = engine.module.odd
    before = strata.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    strata.utils.safe_set_full_optimizer_state(weight, torch.full_like(before, 0.25), "exp_avg")
    assert torch.equal(strata.utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full_like(before, 0.25))
    trained = _states(engine)
    state = engine.optimizer.state_dict()
    _train(engine, 1, 2)
    assert differences(_states(engine), trained) != []
    engine.optimizer.load_state_dict(state)
    again = _states(engine)
    assert [n for n in differences(again, trained) if n.startswith("exp_avg")] == []  # the same codes
    engine.destroy()


def test_states_are_read_and_set_as_numbers():
    run_ranks(2, _by_hand)


# --- objects of other libraries, whose classes these stand in for ---


def _module(name, **contents):
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    sys.modules[name] = module
    return module


class _Manager:
    _one = None

    @classmethod
    def get_instance(cls):
        cls._one = cls._one or cls()
        return cls._one

    def __init__(self):
        self.pid2config, self.module_weight_config_triple = {}, []


def _bitsandbytes(name="adam", optim_bits=8, is_paged=False, **args):
    """(a factory of optimizers, the manager)."""
    settings = {"min_8bit_size": 4096, "percentile_clipping": 100, "block_wise": True, "max_unorm": 0.0,
                "skip_zeros": False}

    class AdamW(torch.optim.Optimizer):
        __module__ = "bitsandbytes.optim.adamw"

        def __init__(self, params):
            defaults = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0,
                        "t_alpha": None, "t_beta3": None}
            super().__init__(params, defaults)
            self.optimizer_name, self.is_paged = name, is_paged
            self.args = types.SimpleNamespace(optim_bits=optim_bits, **(settings | args))

    manager = type("GlobalOptimManager", (_Manager,), {})
    _module("bitsandbytes")
    _module("bitsandbytes.optim", GlobalOptimManager=manager)
    return AdamW, manager.get_instance()


def _torchao(name="AdamW8bit", block_size=256):
    def make(self, params):
        lr = torch.tensor(1e-3, dtype=torch.float64)
        defaults = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.block_size, self.bf16_stochastic_round = block_size, False

    return type(name, (torch.optim.Optimizer,), {"__module__": "torchao.optim.adam", "__init__": make})


def _object(which):
    config = config_of(3, "bf16", optimizer=False, clipping=1.0)
    steps = 1 if which == "torchao" else 2  # its 8 bits of the embedding move the second step
    expected = _trained(_config(3, "bf16"), steps)
    torch.manual_seed(0)
    model = Model()
    if which != "torchao":
        kind, manager = _bitsandbytes()
        manager.module_weight_config_triple.append((model.embedding, "weight", {"optim_bits": 32}))
        optimizer = kind(model.parameters())
        if which == "accelerate":  # as it makes one for offloaded states
            optimizer = DeepSpeedCPUAdam(optimizer.param_groups, lr=1e-3, weight_decay=0.1, adamw_mode=False)
    else:
        optimizer = _torchao()(model.parameters())
    engine = make_engine(model, config | {"train_micro_batch_size_per_gpu": 3}, optimizer=optimizer)
    assert isinstance(engine.optimizer, type(optimizer)) and engine.optimizer.inner is None
    _train(engine, steps)
    unlike = differences(_states(engine), _states(expected))
    assert all("embedding" in name for name in unlike) if which == "torchao" else unlike == []
    engine.destroy()
    expected.destroy()


@pytest.mark.parametrize("which", ["bitsandbytes", "accelerate", "torchao"])
def test_an_object_is_computed_by_the_engine(which):
    run_ranks(2, _object, which)


def _lion_of_32_bits():
    torch.manual_seed(0)
    model = Model()
    optimizer = _bitsandbytes("lion", optim_bits=32)[0](model.parameters())
    engine = make_engine(model, config_of(3, optimizer=False), optimizer=optimizer)
    _train(engine, 1)
    assert strata._C.state_names(engine.core) == ["exp_avg"] and not strata._C.has_8bit_states(engine.core)
    engine.destroy()


def test_lion_of_32_bits_has_a_state_of_numbers():
    run_ranks(1, _lion_of_32_bits)


def _refused():
    cases = {
        "percentile_clipping=5": lambda p: _bitsandbytes(percentile_clipping=5)[0](p),
        "block_wise=False": lambda p: _bitsandbytes(block_wise=False)[0](p),
        "8 bits, as Strata does for AdamW, Adam and Lion": lambda p: _bitsandbytes("rmsprop")[0](p),
        "zero_force_ds_cpu_optimizer": lambda p: DeepSpeedCPUAdam(p, betas=(0.9, 0.99), eps=0, adamw_mode=False),
        "write adamw_torch_8bit": lambda p: _torchao("AdamW4bit")(p),
        "block_size=128": lambda p: _torchao(block_size=128)(p),
    }
    for text, make in cases.items():
        model = make_model()
        with pytest.raises(strata.UsageError, match=text):
            make_engine(model, config_of(3, optimizer=False), optimizer=make(model.parameters()))
    model = make_model()
    kind, manager = _bitsandbytes()
    manager.pid2config[id(model.one)] = {"lr": 1.0}
    with pytest.raises(strata.UsageError, match="overrides lr of a parameter"):
        make_engine(model, config_of(3, optimizer=False), optimizer=kind(model.parameters()))
    eight = {"strata": {"optimizer_states": "8bit"}}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(strata.UsageError, match="SGD keeps its states itself"):
        make_engine(model, config_of(3, optimizer=False, **eight), optimizer=sgd)
    for change, text in (({"optimizer": {"type": "SGD8bit"}}, "AdamW8bit, Adam8bit and Lion8bit"),
                         ({"optimizer": {"type": "SGD"}, **eight}, "are for Adam, AdamW and Lion"),
                         ({"optimizer": {"type": "AdamW8bit"}, "strata": {"optimizer_states": "32bit"}},
                          "contradicts")):
        with pytest.raises(strata.ConfigError, match=text):
            make_engine(make_model(), config_of(3, optimizer=False) | change)


def test_what_no_rule_knows_is_refused():
    run_ranks(1, _refused)


def _ledger(name, place):
    engine = _trained(_config(3, "bf16", name, place), 0)
    foreseen = {tier: engine.memory_forecast(tier) for tier in ("device", "host")}
    _train(engine, 3)
    held = engine.memory_report()
    for tier, forecast in foreseen.items():
        for kind, most in forecast.items():
            if kind not in ("total", "staging"):
                assert held[tier, kind][1] == most, (tier, kind)
    engine.destroy()
    return held[place, "optimizer state"][0]


@pytest.mark.parametrize("place", list(PLACES))
def test_the_ledger_says_what_was_foreseen(place):
    narrow, lion = (run_ranks(2, _ledger, name, place)[0] for name in OPTIMIZERS)
    codes = 2 * 400 * 400 + 4097
    assert 2 * codes * (1 + 4 / 256) / 2 < narrow < 2 * codes * 1.1  # a rank has half, and others' fp32
    assert lion * 2 == narrow


def _tiles(folder, rows):
    rank, world = rank_and_world()
    config = tiled_config(rows=rows, match=["up.weight"]) | {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}
    config["strata"]["min_8bit_size"] = 600
    if rows == 9:
        with pytest.raises(strata.ConfigError, match="must begin at multiples of 256 elements"):
            make_engine(make_tiled(), config)
        return
    engine = make_engine(make_tiled(), config)
    for batch in batches_of(2, world):
        train_step(engine, batch[rank], tiled_loss)
    engine.save_checkpoint(str(folder))
    saved = _states(engine)
    engine.destroy()
    config["strata"].pop("tiles")
    engine = make_engine(make_tiled(seed=1), config)
    engine.load_checkpoint(str(folder))
    assert differences(_states(engine), saved) == []
    engine.destroy()


@pytest.mark.parametrize("rows", [16, 9])
def test_blocks_of_tiles_are_those_of_the_parameter(tmp_path, rows):
    run_ranks(2, _tiles, tmp_path, rows)


def _last_loss(name, seed):
    config = _config(0, "fp32", "AdamW8bit")
    config["optimizer"] = {"type": name, "params": OPTIMIZERS["AdamW8bit"]}
    torch.manual_seed(seed)
    engine = make_engine(Model(), config)
    tokens = make_batches(1, 1, seed=seed)[0, 0]
    losses = [train_step(engine, tokens) for _ in range(60)]
    engine.destroy()
    return sum(losses[-10:]) / 10


def _curves():
    wide = [_last_loss("AdamW", seed) for seed in range(3)]
    narrow = [_last_loss("AdamW8bit", seed) for seed in range(3)]
    spread = max(wide) - min(wide)
    for one, other in zip(wide, narrow, strict=True):
        assert abs(one - other) < spread, (wide, narrow)
    assert max(narrow) < 0.9 * math.log(VOCABULARY)


def test_training_in_8_bits_stays_within_the_spread_of_seeds():
    run_ranks(1, _curves)
