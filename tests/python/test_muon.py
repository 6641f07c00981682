"""Muon in the engine: the bits of plain torch, one orthogonalization a step, and what DeepSpeed has wrong."""

import itertools
import math

import pytest
import strata
import torch
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from strata.model.model_input import ModelTree
from strata.model.tiles import tiles_of
from strata.muon import find_matrices
from strata.ops import muon
from strata.ops.muon import Matrices, Muon
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model,
    rank_and_world, same_bits, train_step,
)  # fmt: skip

PARAMS = {"lr": 0.02, "adam_lr": 5e-3, "weight_decay": 0.1, "momentum": 0.9, "betas": [0.9, 0.99], "eps": 1e-8}


def _config(stage, dtype="fp32", accumulation=1, clipping=0.0, params=PARAMS, **more):
    config = config_of(stage, dtype, accumulation, clipping, live_bytes=1, optimizer=False, **more)
    return {**config, "optimizer": {"type": "Muon", "params": params}}


def _halves(parameters, model=None):
    """([matrices], [others]) of parameters in the order of ``make_model().parameters()``."""
    model = model or make_model()
    matrices = find_matrices(ModelTree(model))
    is_matrix = [id(p) in matrices for p in model.parameters()]
    halves = [[p for p, there in zip(parameters, is_matrix) if there == wanted] for wanted in (True, False)]
    return halves[0], [p for p in halves[1] if p.numel()]


def _reference(parameters):
    matrices, others = _halves(list(parameters))
    return Muon([{"params": matrices, "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9},
                 {"params": others, "use_muon": False, "lr": 5e-3, "weight_decay": 0.1, "betas": (0.9, 0.99),
                  "eps": 1e-8}])  # fmt: skip


class TorchMuonAndAdamW(torch.optim.Optimizer):
    """torch's own classes, side by side."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {})
        matrices, others = _halves(parameters)
        self.both = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9),
                     torch.optim.AdamW(others, lr=5e-3, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8, foreach=False)]

    def step(self, closure=None):
        for optimizer in self.both:
            optimizer.step()


def _close(ours, theirs, step=0):
    """Newton-Schulz in bf16 makes of a difference in the last bit up to one in a hundred of an update."""
    bound = 1e-6 if step == 0 else 1e-3
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def test_the_class_alone_is_torchs_muon_and_adamw():
    values = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    for some in (values, values.T):
        ours, theirs = (f(some.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7) for f in (
            muon.newton_schulz, torch.optim._muon._zeropower_via_newtonschulz))
        assert same_bits(ours, theirs)
    one, other = (PlainTrainer(make_model(), 1, make) for make in (_reference, TorchMuonAndAdamW))
    for step, tokens in enumerate(make_batches(3, 1)):
        for trainer in (one, other):
            trainer.micro_step(tokens, loss_of)
            trainer.step()
        _close(one.values(), other.values(), step)


def _trained(stages, dtype, clipping, more=None, group_size=None):
    rank, world = rank_and_world()
    for stage in stages:
        reference = PlainTrainer(make_model(), world, _reference, dtype=DTYPES[dtype], accumulation=2,
                                 clipping=clipping, loss_scale=256.0 if dtype == "fp16" else 1.0,
                                 group_size=group_size)  # fmt: skip
        engine = make_engine(make_model(), _config(stage, dtype, 2, clipping, **(more or {})))
        for index, tokens in enumerate(make_batches(6, world), 1):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            if index % 2 == 0:
                norm = engine.get_global_grad_norm()
                reference.step(norm)
                assert norm == pytest.approx(reference.norm, rel=1e-5)
                assert differences(full_parameters(engine.module), reference.values()) == [], (stage, index)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_has_the_bits_of_plain_torch(world):
    """At every stage; the raw gradient is clipped, before the momentum, and its norm is the reported one."""
    dtype, clipping = {1: ("fp16", 0.5), 2: ("fp32", 0.1), 3: ("bf16", 0.0)}[world]
    run_ranks(world, _trained, (0, 1, 2, 3), dtype, clipping)


def test_every_shard_group_does_the_same():
    run_ranks(4, _trained, (3,), "fp32", 0.0, {"zero_optimization": {"mics_shard_size": 2}}, 2)


def test_ranks_may_exchange_over_gloo():
    run_ranks(2, _trained, (3,), "bf16", 0.0, {"strata": {"collectives": "c10d"}})


class Linears(torch.nn.Module):
    """Matrices alone, one after the other."""

    def __init__(self, sizes=(8, 12, 12)):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, 12, bias=False) for n in sizes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _calls_of(engine, backward_of, micro_steps):
    """Newton-Schulz's calls on all ranks in ``micro_steps``."""
    calls, original = [], muon.newton_schulz
    muon.newton_schulz = lambda x, *args: calls.append(x.shape) or original(x, *args)
    try:
        for micro in range(micro_steps):
            engine.backward(backward_of(micro))
            engine.step()
    finally:
        muon.newton_schulz = original
    return sum(int(text) for text in engine._collectives.all_gather_text(str(len(calls))))


def _counted():
    """Numbers that DeepSpeed had wrong, of its issues 8441, 8443 and 8438: SGD at stage 0, an orthogonalization in each
    micro-step at stage 3, and no matrix found under zero.Init."""
    from hf_models import MODELS

    rank, world = rank_and_world()
    values = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(2))
    for stage, sizes, accumulation in ((0, (8, 12), 1), (3, (8, 12, 12, 12), 4)):
        engine = make_engine(Linears(sizes), _config(stage, accumulation=accumulation, params={}))
        found = _calls_of(engine, lambda _, engine=engine: engine(values[rank]), 3 * accumulation)
        assert found == 3 * len(sizes), (stage, found)
        engine.destroy()
    config = _config(3, params={})
    with strata.zero.Init(config_dict_or_path=config):
        model = MODELS["qwen3"].build()
    engine = make_engine(model, config)
    assert sum(rule == "muon" for rule, *_ in engine.optimizer.rules.values()) == 14
    ids = torch.arange(18).view(2, 9) + 5
    assert _calls_of(engine, lambda _: engine(input_ids=ids, labels=ids).loss, 6) == 84


def test_each_matrix_is_orthogonalized_once_a_step():
    run_ranks(2, _counted)


def _one_list(folder):
    """However a model is built, the same parameters are matrices."""
    from hf_models import MODELS

    rank, _ = rank_and_world()
    config = _config(3, params={})
    for name, count in (("qwen3", 14), ("qwen3_moe", 14)):
        live = MODELS[name].build()
        with torch.device("meta"):
            meta = MODELS[name].build()
        found = [{n for n, p in m.named_parameters() if id(p) in find_matrices(ModelTree(m))} for m in (live, meta)]
        if rank == 0:
            live.save_pretrained(f"{folder}/{name}")
        with strata.zero.Init(config_dict_or_path=config):
            sharded = MODELS[name].build()
        for make in (lambda: make_engine(sharded, config), lambda: make_engine(live, config),
                     lambda: strata.load_pretrained(f"{folder}/{name}", config)[0]):
            engine = make()
            found.append({n for n, p in engine.module.named_parameters() if id(p) in engine.optimizer.rules})
            engine.destroy()
        assert len(found[0]) == count and all(names == found[0] for names in found), found
    model = make_model()
    engine = make_engine(model, config)
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq"} == set(strata._C.state_names(engine.core))
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)  # which writes to weights: none is in use since it was looked at


def test_one_list_of_matrices_for_every_way_to_build_a_model(tmp_path):
    run_ranks(2, _one_list, str(tmp_path))


def _skipped():
    """A gradient that is not finite on one rank changes no state, and training goes on."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), _config(3, "fp16"))
    first, second = make_batches(2, world)
    train_step(engine, first[rank])
    weight = engine.module.layers[0].up.weight
    kept, before = strata.utils.safe_get_full_optimizer_state(weight, "momentum_buffer"), full_parameters(engine.module)
    train_step(engine, second[rank], lambda m, t: loss_of(m, t) * (float("inf") if rank == 1 else 1.0))
    assert not engine.was_step_applied()
    assert same_bits(strata.utils.safe_get_full_optimizer_state(weight, "momentum_buffer"), kept)
    assert differences(full_parameters(engine.module), before) == []
    train_step(engine, second[rank])
    assert engine.was_step_applied() and differences(full_parameters(engine.module), before) != []


def test_a_skipped_step_changes_no_state():
    run_ranks(2, _skipped)


def _saved(folder):
    batches = make_batches(4, 2)
    engine = make_engine(make_model(), _config(2, "bf16"))
    for tokens in batches[:2]:
        train_step(engine, tokens[0])  # the mean over ranks does not depend on their number
    engine.save_checkpoint(folder)
    for tokens in batches[2:]:
        train_step(engine, tokens[0])
    return full_parameters(engine.module)


def _goes_on(folder, stage, expected):
    engine = make_engine(make_model(seed=5), _config(stage, "bf16"))
    engine.load_checkpoint(folder)
    for tokens in make_batches(4, 2)[2:]:
        train_step(engine, tokens[0])
    assert differences(full_parameters(engine.module), expected) == []


def test_training_goes_on_at_other_world_sizes_and_stages(tmp_path):
    expected = run_ranks(2, _saved, str(tmp_path))[0]
    for world, stage in ((1, 0), (4, 3)):
        run_ranks(world, _goes_on, str(tmp_path), stage, expected)


class KellersMuon(torch.optim.Optimizer):
    """Groups as in Keller Jordan's MuonWithAuxAdam, whose step calls collectives of its own."""

    def __init__(self, groups):
        super().__init__(groups, {})

    def step(self, closure=None):
        raise AssertionError("the engine does not call it")


KellersMuon.__name__ = "MuonWithAuxAdam"


def _given():
    """Objects of other libraries run in the engine, with the settings of their groups and their schedules."""
    rank, world = rank_and_world()

    def kellers(parameters, model=None):
        matrices, others = _halves(list(parameters), model)
        return [{"params": matrices, "use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
                {"params": others, "use_muon": False, "lr": 5e-3, "betas": (0.9, 0.99), "eps": 1e-8,
                 "weight_decay": 0.1}]  # fmt: skip

    model = make_model()
    client = KellersMuon(kellers(model.parameters(), model))
    reference = PlainTrainer(make_model(), world, lambda p: Muon(kellers(p)))
    engine = make_engine(model, config_of(3, optimizer=False, live_bytes=1), optimizer=client)
    halves = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (engine.optimizer, reference.optimizer)]
    for tokens in make_batches(3, world):
        reference.micro_step(tokens, loss_of)
        with exact_square_roots():
            train_step(engine, tokens[rank])
        reference.step()
        for half in halves:
            half.step()
    assert differences(full_parameters(model), reference.values()) == []
    engine.destroy()

    values = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(2))
    rule = lambda p: torch.optim.Muon(p, lr=0.05, adjust_lr_fn="match_rms_adamw")  # noqa: E731
    for stage in (1, 3):
        reference, model = PlainTrainer(Linears(), world, rule), Linears()
        engine = make_engine(model, config_of(stage, optimizer=False, live_bytes=1), optimizer=rule(model.parameters()))
        for step in range(3):
            reference.micro_step(values, lambda m, x: m(x))
            reference.step()
            engine.backward(engine(values[rank]))
            engine.step()
            _close(full_parameters(model), reference.values(), step)
        engine.destroy()


def test_objects_of_torch_and_of_keller_jordan_run_in_the_engine():
    run_ranks(2, _given)


def _groups():
    """DeepSpeed's precedence: a group's own setting, then muon_lr and adam_lr, then lr."""
    model = make_model()
    decayed, plain = _halves(list(model.parameters()), model)
    groups = [{"params": [*decayed, *plain[:2]], "weight_decay": 0.3}, {"params": plain[2:], "lr": 7.0}]
    params = {"lr": 1.0, "adam_lr": 2.0, "weight_decay": 0.1}
    engine = strata.initialize(model=model, config=_config(2, params=params), model_parameters=groups)[0]
    found = [(g["use_muon"], g["lr"], g["weight_decay"]) for g in engine.optimizer.param_groups]
    assert found == [(True, 1.0, 0.3), (False, 2.0, 0.3), (False, 7.0, 0.1)]
    with pytest.raises(strata.ConfigError, match="params.moment: wanted a key of Muon.*nearest is \"momentum\""):
        make_engine(make_model(), _config(2, params={"moment": 0.9}))
    with pytest.raises(strata.ConfigError, match="ns_method: wanted \"gram\" or \"standard\""):
        make_engine(make_model(), _config(2, params={"ns_method": "svd"}))
    with pytest.raises(strata.UsageError, match="no hidden matrix"):
        make_engine(torch.nn.LayerNorm(4), _config(2))
    with pytest.raises(strata.UsageError, match="per_head_muon.*head_dim"):
        make_engine(make_model(), _config(2, params={"per_head_muon": True}))
    wrong = make_model()
    wrong.layers[0].norm.weight.use_muon = True
    with pytest.raises(strata.UsageError, match="'layers.0.norm.weight' has use_muon.*shape"):
        make_engine(wrong, _config(2))


def test_groups_and_bad_input():
    run_ranks(1, _groups)


SETTINGS = {"ns_coefficients": muon.SIMPLE, "ns_steps": 5, "eps": 1e-7, "adjust_lr_fn": None}


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_matrices_that_lie_in_one_are_orthogonalized_apart(adjust):
    settings = {**SETTINGS, "adjust_lr_fn": adjust}
    values = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    fused = Matrices([40, 16], cuts=[24, 8, 8])  # query, key and value
    result = values.clone().view(-1)
    fused.orthogonalize(result, settings)
    for rows, part, ours in zip((24, 8, 8), values.split([24, 8, 8]), result.view(40, 16).split([24, 8, 8])):
        wanted = muon.newton_schulz(part).float() * muon.factor_of(rows, 16, adjust)
        torch.testing.assert_close(ours.float() * fused.factor(adjust), wanted, rtol=1e-2, atol=1e-3)


def test_experts_and_heads_are_matrices_of_their_own():
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn(5, 12, 8, generator=generator).bfloat16()
    gate_up = Matrices([5, 12, 8], cuts=[6, 6])
    result = experts.clone().view(-1)
    gate_up.orthogonalize(result, SETTINGS)
    for expert, half in itertools.product(range(5), (0, 1)):
        rows = slice(6 * half, 6 * half + 6)
        wanted = muon.newton_schulz(experts[expert, rows])
        torch.testing.assert_close(result.view(5, 12, 8)[expert, rows], wanted, rtol=3e-2, atol=3e-2)
        singular = torch.linalg.svdvals(result.view(5, 12, 8)[expert, rows].float())
        assert 0.4 < singular.min() and singular.max() < 1.3
    heads = Matrices([12, 8], heads=4)
    assert heads.factor("match_rms_adamw") == 0.2 * math.sqrt(8)


def test_the_matrices_of_models_of_transformers():
    from hf_models import MODELS, llama

    tree = ModelTree(llama())
    found, names = find_matrices(tree), {id(p): name for name, p in tree.parameters}
    assert all("proj" in names[key] for key in found) and len(found) == 7 * tree.model.config.num_hidden_layers
    mixtral = ModelTree(MODELS["mixtral"].build())
    fused = {name.rsplit(".", 1)[-1]: find_matrices(mixtral)[id(p)] for name, p in mixtral.parameters
             if name.endswith(("gate_up_proj", "down_proj"))}  # fmt: skip
    assert len(fused["gate_up_proj"].cuts) == 2 and len(fused["down_proj"].cuts) == 1
    gpt2 = ModelTree(MODELS["gpt2"].build())
    names = {id(p): name for name, p in gpt2.parameters}
    assert not any("wte" in names[key] or "wpe" in names[key] for key in find_matrices(gpt2))


def _accounted():
    """The ledger says what was foreseen of rank 0. The momentum is fp32, also of bf16 weights."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), _config(3, "bf16"))
    forecast = engine.memory_forecast()
    engine.core.reset_memory_peaks()
    for tokens in make_batches(3, world):
        train_step(engine, tokens[rank])
    peaks = {kind: peak for (tier, kind), (_, peak) in engine.memory_report().items() if tier == "device"}
    kinds = ("optimizer state", "master weights", "gradient shards", "staging", "weights")
    if rank == 0:
        assert {kind: peaks[kind] for kind in kinds} == {kind: forecast[kind] for kind in kinds}
    units = {unit["name"]: unit for unit in engine.core.units()}
    assert any(name.endswith(":muon") for name in units) or len(units) > 4
    state = engine.optimizer.state_dict()["state"]
    assert {value.dtype for kept in state.values() for name, value in kept.items()} == {torch.float32}


def test_the_ledger_says_what_was_foreseen():
    run_ranks(2, _accounted)


class Experts(torch.nn.Module):
    """Fused experts, as in transformers, all of which compute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(6, 16, 8) / 3)
        self.down_proj = torch.nn.Parameter(torch.randn(6, 8, 8) / 3)

    def forward(self, x):
        gate, up = torch.einsum("bi,eoi->ebo", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebi,eoi->bo", torch.sigmoid(gate) * up, self.down_proj).square().mean()


def _experts():
    rank, world = rank_and_world()
    values = torch.randn(world, 4, 8, generator=torch.Generator().manual_seed(2))

    def reference(parameters):
        rule = Muon([{"params": list(parameters), "lr": 0.02, "momentum": 0.95}])
        rule.matrices = dict(zip(map(id, rule.param_groups[0]["params"]), find_matrices(ModelTree(Experts())).values()))
        return rule

    for stage in (0, 3):
        plain, model = PlainTrainer(Experts(), world, reference), Experts()
        engine = make_engine(model, _config(stage, params={}))
        for _ in range(3):
            plain.micro_step(values, lambda m, x: m(x))
            plain.step()
            engine.backward(engine(values[rank]))
            engine.step()
        assert differences(full_parameters(model), plain.values()) == [], stage
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fused_experts_are_trained_as_matrices_of_their_own(world):
    """With the same bits wherever they lie: in place, in batches of one size, or at an owner."""
    run_ranks(world, _experts)


def _tiled_experts():
    """Tiles hold whole experts, whose bits do not depend on the tile."""
    from hf_models import MODELS

    rank, world = rank_and_world()
    found = []
    for most in (5000, 1 << 30):
        tiles = {"max_gather": most, "match": ["*.experts.*"]}
        torch.manual_seed(0)
        model = MODELS["qwen3_moe"].build().eval()
        model.set_experts_implementation("eager")
        engine = make_engine(model, _config(3, strata={"tiles": tiles}))
        assert any(tiles_of(p) is not None for p in model.parameters()) == (most == 5000)
        generator = torch.Generator().manual_seed(5)
        for step in range(3):
            batch = [MODELS["qwen3_moe"].batch(generator, step, r) for r in range(world)][rank]
            engine.backward(engine(**batch).loss)
            engine.step()
        found.append(full_parameters(model))
        engine.destroy()
    assert differences(*found) == []


def test_experts_in_tiles_have_the_bits_of_whole_ones():
    run_ranks(2, _tiled_experts)


def test_a_matrix_has_the_same_bits_in_any_company():
    values = torch.randn(7, 24, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts = Matrices([7, 24, 8], cuts=[12, 12])
    together, apart = values.clone(), values.clone()
    muon.orthogonalize([(experts, together.view(-1), SETTINGS)])
    for some in (apart[2:3], apart[:2], apart[3:]):
        muon.orthogonalize([(experts, some.view(-1), SETTINGS)])
    twice = [values.clone(), values.clone()]
    muon.orthogonalize([(experts, some.view(-1), SETTINGS) for some in twice])
    assert all(same_bits(together, other) for other in (apart, *twice))


def _beside_other_settings():
    """Updates in backward, reductions at the boundary, states that leave for a while: the bits are the same."""
    rank, world = rank_and_world()
    found = []
    for more in ({}, {"update_at": "backward"}, {"reduce_at": "boundary"}, {"parks": True}):
        parks = more.pop("parks", False)
        config = _config(3, "bf16", strata={"max_live_bytes": 1, **more}, bf16={"check_grad_overflow": False})
        engine = make_engine(make_model(), config)
        for tokens in make_batches(3, world):
            train_step(engine, tokens[rank])
            if parks:
                engine.offload_states()
                engine.reload_states()
        found.append(full_parameters(engine.module))
        engine.destroy()
    assert all(differences(values, found[0]) == [] for values in found)


def test_other_settings_do_not_change_the_bits():
    run_ranks(2, _beside_other_settings)


def _beside_8_bits():
    """States in 8 bits are AdamW's; the momentum stays fp32, and the matrices' bits are those without."""
    rank, world = rank_and_world()
    found = []
    for more in ({}, {"optimizer_states": "8bit", "min_8bit_size": 1}):
        engine = make_engine(make_model(), _config(2, strata={"max_live_bytes": 1, **more}))
        train_step(engine, make_batches(1, world)[0][rank])
        weight = engine.module.layers[0].up.weight
        state = [s for s in engine.optimizer.state_dict()["state"].values() if "momentum_buffer" in s]
        assert len(state) == 7 and all(s["momentum_buffer"].dtype == torch.float32 for s in state)
        momentum = strata.utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
        found.append((full_parameters(engine.module)["layers.0.up.weight"], momentum))
        engine.destroy()
    assert all(same_bits(one, other) for one, other in zip(*found))


def test_the_momentum_is_not_in_8_bits():
    run_ranks(2, _beside_8_bits)


class Moonlight(torch.optim.Optimizer):
    """With the groups, states and update of Moonlight's class, whose momentum is a sum."""

    def __init__(self, matrices, others, **settings):
        super().__init__([*matrices, *others], {"lr": 2e-3, "wd": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5,
                                                "adamw_betas": (0.9, 0.99), "adamw_eps": 1e-8, **settings})
        for is_matrix, parameters in ((True, matrices), (False, others)):
            for p in parameters:
                self.state[p]["use_muon"] = is_matrix

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["wd"])
                if state["use_muon"]:
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    update = muon.newton_schulz(p.grad.add(buffer, alpha=group["momentum"])).float()
                    p.sub_(update * group["lr"] * 0.2 * math.sqrt(max(p.shape)))
                    continue
                step = state["step"] = state.get("step", 0) + 1
                betas = group["adamw_betas"]
                first, second = (state.setdefault(f"moment{i}", torch.zeros_like(p)) for i in (1, 2))
                first.lerp_(p.grad, 1 - betas[0])
                second.lerp_(p.grad.square(), 1 - betas[1])
                scale = (1 - betas[0] ** step) / math.sqrt(1 - betas[1] ** step)
                p.sub_(first / (group["adamw_eps"] + second.sqrt()) * group["lr"] / scale)


Moonlight.__name__ = "Muon"


def _moonlight():
    rank, world = rank_and_world()
    reference = PlainTrainer(make_model(), world, lambda parameters: Moonlight(*_halves(list(parameters))))
    schedule = torch.optim.lr_scheduler.StepLR(reference.optimizer, 2, 0.5)
    model = make_model()
    client = Moonlight(*_halves(list(model.parameters())))
    engine = make_engine(model, config_of(3, optimizer=False), optimizer=client,
                         lr_scheduler=torch.optim.lr_scheduler.StepLR(client, 2, 0.5))
    for step, tokens in enumerate(make_batches(3, world), 1):
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
        schedule.step()
        _close(full_parameters(engine.module), reference.values(), step)  # its eps counts before the bias correction
    assert [group["use_muon"] for group in engine.optimizer.param_groups] == [True, False]
    momentum = strata.utils.safe_get_full_optimizer_state(engine.module.layers[0].up.weight, "momentum_buffer")
    engine.optimizer.load_state_dict(reference.optimizer.state_dict())
    again = strata.utils.safe_get_full_optimizer_state(engine.module.layers[0].up.weight, "momentum_buffer")
    torch.testing.assert_close(again, momentum, rtol=1e-2, atol=1e-5)
    engine.destroy()


def test_an_object_of_moonlights_class_is_run_as_muon():
    """Also where a schedule was made of it before: both halves have its rate."""
    run_ranks(2, _moonlight)


def _dion():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.param_groups[0].update(algorithm="muon", mu=0.95)
    with pytest.raises(strata.UsageError, match="exchanges gradients itself.*strata.ops.muon.Muon"):
        make_engine(model, config_of(2, optimizer=False), optimizer=optimizer)


def test_dions_classes_are_refused_with_the_class_to_take():
    run_ranks(1, _dion)
