"""Optimizers of the user's that need whole parameters: each is updated by the rank that owns it."""

import itertools
import os

import pytest
import strata
import torch
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    DTYPES, TinyModel, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model,
    rank_and_world, same_bits, train_step,
)  # fmt: skip


class Lamb(torch.optim.Optimizer):
    """AdamW, whose updates have the norm of the parameter."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - group["betas"][1])
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * p
                ratio = p.norm() / update.norm() if p.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * update)


class Shampoo(torch.optim.Optimizer):
    """Matrices are preconditioned from both sides; its states have the shapes of neither."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient = p.grad.reshape(len(p) if p.dim() else 1, -1)
                sides = self.state[p].setdefault("sides", [torch.eye(n) * 1e-3 for n in gradient.shape])
                sides[0] += gradient @ gradient.T
                sides[1] += gradient.T @ gradient
                roots = []
                for side in sides:
                    values, vectors = torch.linalg.eigh(side)
                    roots.append((vectors * values.clamp(min=1e-6) ** -0.25) @ vectors.T)
                p.sub_((roots[0] @ gradient @ roots[1]).view(p.shape), alpha=group["lr"])


def _transformers_adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9)


def _filled(parameters):
    return [p for p in parameters if p.numel()]


def _in_groups(rule):
    """One group of matrices, one of the rest with half the rate."""
    def make(parameters):
        filled = _filled(parameters)
        return rule([{"params": [p for p in filled if p.dim() > 1]},
                     {"params": [p for p in filled if p.dim() < 2], "lr": 5e-3}])

    return make


RULES = {
    "torch's Adafactor": lambda p: torch.optim.Adafactor(_filled(p), lr=1e-2, weight_decay=0.1),
    "transformers' Adafactor": lambda p: _transformers_adafactor(_filled(p)),
    "Lamb": Lamb,  # has the parameter without elements, too
    "Lamb in groups": _in_groups(Lamb),
    "Shampoo": lambda p: Shampoo(_filled(p)),
}


def _trained(rules, stages, dtype, clipping, more=None):
    """The bits of plain torch, with a rate that changes."""
    rank, world = rank_and_world()
    for name, stage in itertools.product(rules, stages):
        reference = PlainTrainer(make_model(), world, RULES[name], dtype=DTYPES[dtype], accumulation=2,
                                 clipping=clipping, loss_scale=256.0 if dtype == "fp16" else 1.0)
        model = make_model()
        engine = make_engine(model, config_of(stage, dtype, 2, clipping, optimizer=False, live_bytes=1, **(more or {})),
                             optimizer=RULES[name](model.parameters()))
        halves = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
                  for optimizer in (engine.optimizer, reference.optimizer)]
        for index, tokens in enumerate(make_batches(6, world), 1):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            if index % 2 == 0:
                reference.step(engine.get_global_grad_norm())
                for half in halves:
                    half.step()
                assert differences(full_parameters(model), reference.values()) == [], (name, stage, index)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_has_the_bits_of_plain_torch(world):
    dtype, clipping = {1: ("fp16", 0.5), 2: ("fp32", 0.5), 3: ("bf16", 0.0)}[world]
    run_ranks(world, _trained, list(RULES), (0, 1, 2, 3), dtype, clipping)


def test_every_shard_group_does_the_same():
    groups = {"zero_optimization": {"mics_shard_size": 2}}
    run_ranks(4, _trained_in_groups, groups)


def _trained_in_groups(more):
    rank, world = rank_and_world()
    rule = RULES["Lamb"]
    reference = PlainTrainer(make_model(), world, rule, group_size=2)
    model = make_model()
    engine = make_engine(model, config_of(3, optimizer=False, **more), optimizer=rule(model.parameters()))
    for tokens in make_batches(3, world):
        reference.micro_step(tokens, loss_of)
        with exact_square_roots():
            train_step(engine, tokens[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []


def _secondary_shards():
    model = make_model()
    with pytest.raises(strata.ConfigError, match="zero_hpz_partition_size.*whole parameters"):
        make_engine(model, config_of(3, optimizer=False, zero_optimization={"zero_hpz_partition_size": 2}),
                    optimizer=Lamb(_filled(model.parameters())))


def test_secondary_shards_are_refused():
    run_ranks(4, _secondary_shards)


class One(torch.nn.Module):
    """Has fewer parameters than a job has ranks."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))

    def forward(self, values):
        return (values @ self.weight).square().mean()


def _one_parameter():
    rank, world = rank_and_world()
    values = torch.arange(world * 6.0).view(world, 2, 3) / 10
    for stage in (0, 2, 3):
        reference = PlainTrainer(One(), world, Lamb)
        model = One()
        engine = make_engine(model, config_of(stage, optimizer=False, live_bytes=1), optimizer=Lamb(model.parameters()))
        for _ in range(3):
            reference.micro_step(values, lambda m, v: m(v))
            reference.step()
            engine.backward(engine(values[rank]))
            engine.step()
        assert differences(full_parameters(model), reference.values()) == [], stage
        owned = [p for group in engine.optimizer.param_groups for p in group["params"]]
        assert len(owned) == (1 if rank == 0 else 0)
        engine.save_checkpoint(os.environ["FOLDER"], tag=f"stage{stage}")
        engine.load_checkpoint(os.environ["FOLDER"], tag=f"stage{stage}")
        engine.destroy()


def test_a_rank_may_own_no_parameter(tmp_path):
    run_ranks(3, _one_parameter, env={"FOLDER": str(tmp_path)})


def _skipped():
    """A gradient that is not finite on one rank: no state changes a bit."""
    rank, world = rank_and_world()
    model = make_model()
    engine = make_engine(model, config_of(2, "fp16", optimizer=False), optimizer=RULES["Lamb in groups"](
        model.parameters()))
    first, second = make_batches(2, world)
    train_step(engine, first[rank])
    kept = {p: {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
            for p, state in engine.optimizer.state.items()}
    weights = full_parameters(model)
    train_step(engine, second[rank], lambda m, t: loss_of(m, t) * (float("inf") if rank == 1 else 1.0))
    assert not engine.was_step_applied()
    assert differences(full_parameters(model), weights) == []
    for p, state in kept.items():
        assert all(same_bits(engine.optimizer.state[p][k], v) for k, v in state.items())
        assert engine.optimizer.state[p]["step"] == 1
    train_step(engine, second[rank])
    assert engine.was_step_applied() and differences(full_parameters(model), weights) != []


def test_a_skipped_step_changes_no_state():
    run_ranks(2, _skipped)


def _built_sharded():
    rank, world = rank_and_world()
    rule = RULES["torch's Adafactor"]
    reference = PlainTrainer(make_model(), world, rule)
    torch.manual_seed(0)
    config = config_of(3, optimizer=False, live_bytes=1)
    with strata.zero.Init(config_dict_or_path=config):
        model = TinyModel()
    engine = make_engine(model, config, optimizer=_adafactor_of(model))
    for tokens in make_batches(2, world):
        reference.micro_step(tokens, loss_of)
        with exact_square_roots():
            train_step(engine, tokens[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []


def _adafactor_of(model):
    filled = [p for p in model.parameters() if torch.Size(p.ds_shape).numel()]
    return torch.optim.Adafactor(filled, lr=1e-2, weight_decay=0.1)


def test_a_model_may_be_built_sharded():
    run_ranks(2, _built_sharded)


NAMES = ["torch's Adafactor", "transformers' Adafactor", "Lamb in groups", "Shampoo"]


def _saved(folder):
    rank, world = rank_and_world()
    batches = make_batches(4, 2)
    found = {}
    for name in NAMES:
        model = make_model()
        engine = make_engine(model, config_of(2, "bf16", optimizer=False), optimizer=RULES[name](model.parameters()))
        for tokens in batches[:2]:
            train_step(engine, tokens[0])  # the mean over ranks does not depend on their number
        engine.save_checkpoint(f"{folder}/{name}")
        for tokens in batches[2:]:
            train_step(engine, tokens[0])
        found[name] = full_parameters(model)
        engine.destroy()
    return found


def _goes_on(folder, stage, expected):
    for name in NAMES:
        model = make_model(seed=5)
        engine = make_engine(model, config_of(stage, "bf16", optimizer=False),
                             optimizer=RULES[name](model.parameters()))
        engine.load_checkpoint(f"{folder}/{name}")
        for tokens in make_batches(4, 2)[2:]:
            train_step(engine, tokens[0])
        assert differences(full_parameters(model), expected[name]) == [], name
        engine.destroy()


def test_training_goes_on_at_other_world_sizes_and_stages(tmp_path):
    expected = run_ranks(2, _saved, str(tmp_path))[0]
    for world, stage in ((1, 0), (4, 3), (2, 1)):
        run_ranks(world, _goes_on, str(tmp_path), stage, expected)


def _states():
    """Read and set by name, from every rank; parked; kept by state_dict()."""
    rank, world = rank_and_world()
    model = make_model()
    engine = make_engine(model, config_of(2, optimizer=False), optimizer=RULES["Lamb"](model.parameters()))
    reference = PlainTrainer(make_model(), world, RULES["Lamb"])
    batches = make_batches(4, world)
    with exact_square_roots():
        for tokens in batches[:2]:
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
    by_name = dict(zip((n for n, _ in model.named_parameters()), reference.masters))
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        whole = strata.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert same_bits(whole, reference.optimizer.state[by_name[name]]["exp_avg"]), name
        local = strata.utils.safe_get_local_optimizer_state(parameter, "exp_avg")
        assert local is None or local.numel() in (0, whole.numel())
        strata.utils.safe_set_full_optimizer_state(parameter, whole * 2, "exp_avg")
        assert same_bits(strata.utils.safe_get_full_optimizer_state(parameter, "exp_avg"), whole * 2)
        strata.utils.safe_set_full_optimizer_state(parameter, whole, "exp_avg")
    kept = engine.optimizer.state_dict()
    engine.offload_states()
    engine.reload_states()
    with exact_square_roots():
        for tokens in batches[2:]:
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
        assert differences(full_parameters(model), reference.values()) == []
        engine.optimizer.load_state_dict(kept)
    whole = strata.utils.safe_get_full_optimizer_state(model.head.weight, "exp_avg")
    numbers = [number for number, state in kept["state"].items() if same_bits(state["exp_avg"], whole)]
    assert len("".join(engine._collectives.all_gather_text("x" * len(numbers)))) == 1  # the owner's alone


def test_states_are_read_set_parked_and_loaded():
    run_ranks(2, _states)


def _unlike():
    """Ranks that bring optimizers of different kinds."""
    rank, _ = rank_and_world()
    model = make_model()
    rule = Lamb if rank == 1 else torch.optim.AdamW
    with pytest.raises(strata.ConfigError, match="update rule = (adamw|whole)"):
        make_engine(model, config_of(2, optimizer=False), optimizer=rule(_filled(model.parameters())))


def test_ranks_with_different_rules_are_refused():
    run_ranks(2, _unlike)


class Failing(Lamb):
    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("the step went wrong")
        super().step(closure)


def _fails_on_one():
    rank, world = rank_and_world()
    model = make_model()
    client = Failing(_filled(model.parameters()))
    client.fails = False
    engine = make_engine(model, config_of(2, optimizer=False), optimizer=client)
    first, second = make_batches(2, world)
    train_step(engine, first[rank])
    client.fails = rank == 1
    expected = (ArithmeticError, "the step went wrong") if rank == 1 else (strata.Error, "rank 1.*went wrong")
    with pytest.raises(expected[0], match=expected[1]):
        train_step(engine, second[rank])


def test_a_step_that_fails_on_its_owner_is_an_error_on_every_rank():
    run_ranks(2, _fails_on_one)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: parameters are y in training and the average x in evaluation."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _move(self, to_training):
        for group in self.param_groups:
            if group["training"] != to_training:
                weight = 1 - group["beta"] if to_training else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["training"] = to_training

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before step()")
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                scale = self._scale(p)
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * scale * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"] * scale)
            group["k"] += 1

    def _scale(self, p):
        return 1.0


class ScheduleFreeByNorm(ScheduleFree):
    def _scale(self, p):
        return 1 / (1 + p.norm().item())


def _both_modes(folder):
    rank, world = rank_and_world()
    for rule, stage, dtype in itertools.product((ScheduleFree, ScheduleFreeByNorm), (1, 3), ("fp32", "bf16")):
        make = lambda p, rule=rule: rule(_filled(p))  # noqa: E731
        reference = PlainTrainer(make_model(), world, make, dtype=DTYPES[dtype])
        model = make_model()
        client = make(model.parameters())
        engine = make_engine(model, config_of(stage, dtype, optimizer=False, live_bytes=1), optimizer=client)
        for optimizer in (engine.optimizer, reference.optimizer):
            optimizer.train()
        for index, tokens in enumerate(make_batches(4, world)):
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
            if index == 1:  # evaluation, and a save of what it saw
                (client if stage == 1 else engine.optimizer).eval()
                reference.optimizer.eval()
                for p, master in zip(reference.parameters, reference.masters):
                    p.data.copy_(master)
                assert differences(full_parameters(model), reference.values()) == [], (rule, stage, dtype)
                engine.save_checkpoint(folder, tag=f"{rule.__name__}{stage}{dtype}")
                engine.load_checkpoint(folder, tag=f"{rule.__name__}{stage}{dtype}")
                engine.optimizer.train()
                reference.optimizer.train()
                for p, master in zip(reference.parameters, reference.masters):
                    p.data.copy_(master)
            assert differences(full_parameters(model), reference.values()) == [], (rule, stage, dtype)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_weights_follow_a_schedule_free_optimizer_into_evaluation_and_back(world, tmp_path):
    run_ranks(world, _both_modes, str(tmp_path))


def _accounted():
    """The ledger says what was foreseen of rank 0; another rank owns no more."""
    rank, world = rank_and_world()
    model = make_model()
    engine = make_engine(model, config_of(3, "bf16", optimizer=False, live_bytes=1),
                         optimizer=RULES["Lamb"](model.parameters()))
    forecast = engine.memory_forecast()
    engine.core.reset_memory_peaks()
    for tokens in make_batches(3, world):
        train_step(engine, tokens[rank])
    peaks = {kind: peak for (tier, kind), (_, peak) in engine.memory_report().items() if tier == "device"}
    for kind in ("master weights", "gradient shards", "staging", "weights"):
        if rank == 0:
            assert peaks[kind] == forecast[kind], kind
        assert peaks[kind] <= forecast[kind] + 4096, kind


def test_the_ledger_says_what_was_foreseen():
    run_ranks(2, _accounted)


def _over_gloo():
    _trained(["torch's Adafactor", "Shampoo"], (3,), "fp32", 0.0, {"strata": {"collectives": "c10d"}})


def test_ranks_may_exchange_over_gloo():
    run_ranks(2, _over_gloo)


def _unfrozen():
    rank, world = rank_and_world()
    model, plain = make_model(), make_model()
    for of in (model, plain):
        of.layers[1].requires_grad_(False)
    rule = RULES["Lamb"]
    reference = PlainTrainer(plain, world, rule)
    engine = make_engine(model, config_of(3, optimizer=False, live_bytes=1),
                         optimizer=Lamb(_filled(p for p in model.parameters())))
    before = [p.shape for group in engine.optimizer.param_groups for p in group["params"]]
    tokens = make_batches(3, world)
    with exact_square_roots():
        train_step(engine, tokens[0][rank])
        reference.micro_step(tokens[0], loss_of)
        reference.step()
        assert differences(full_parameters(model), reference.values()) == []
        model.layers[1].requires_grad_(True)
        for batch in tokens[1:]:
            train_step(engine, batch[rank])
    after = [p.shape for group in engine.optimizer.param_groups for p in group["params"]]
    counts = engine._collectives.all_gather_text(f"{len(after) - len(before)}")
    assert sum(map(int, counts)) == len(list(model.layers[1].parameters()))
    values, start = full_parameters(model), full_parameters(make_model())
    assert all(not torch.equal(values[n], start[n].to(values[n].dtype)) for n in values if n.startswith("layers.1."))


def test_parameters_that_are_unfrozen_get_owners():
    run_ranks(2, _unfrozen)


def _by_trainer(folder, stage):
    """Trainer's optim="adafactor" over 2 ranks, or in plain torch where ``stage`` is None."""
    from hf_jobs import Recorder, Texts, arguments
    from hf_models import llama
    from strata.integrations.transformers import StrataTrainerMixin

    rank, world = rank_and_world()
    torch.manual_seed(0)
    model = llama()
    args = arguments(folder, None, optim="adafactor", per_device_train_batch_size=4 // world)
    data = {"args": args, "model": model, "train_dataset": Texts(96, 1)}
    if stage is None:
        trainer = Recorder(**data)
    else:
        cls = type("Sharded", (StrataTrainerMixin, Recorder), {})
        trainer = cls(**data, strata_config={"zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0}})
    trainer.train()
    return full_parameters(model), [entry["learning_rate"] for entry in trainer.state.log_history[:-1]]


def test_trainers_adafactor_is_that_of_plain_torch(tmp_path):
    plain, rates = run_ranks(1, _by_trainer, str(tmp_path), None)[0]
    for stage in (2, 3):
        for values, found in run_ranks(2, _by_trainer, str(tmp_path), stage):
            assert found == rates
            for name, value in values.items():
                torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")
