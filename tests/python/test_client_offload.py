"""Optimizers of the user's whose masters and states rest on the host, where they update: the bits of plain torch."""

import copy
import itertools

import pytest
import strata
import torch
from devices import ON_GPU, shares_a_gpu
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from soak import each_once
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
    same_bits, train_step,
)


class OwnLion(strata.ops.lion.FusedLion):
    """With an update of its own, which the engine therefore does not replace by its own Lion."""

    def compute(self, *given):
        super().compute(*given)


LION = {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}
RULES = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, foreach=False),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "lion": lambda p: OwnLion(p, **LION),
}


def _zero(stage, weights_too=False, **more):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True, **more}}
    return {**zero, "offload_param": {"device": "cpu"}} if weights_too else zero


def _engine(rule, dtype, accumulation=1, zero=None, seed=0, **more):
    model = make_model(seed=seed)
    config = config_of(zero["stage"], dtype, accumulation, optimizer=False, zero_force_ds_cpu_optimizer=False,
                       zero_optimization=zero, **more)
    return make_engine(model, config, optimizer=RULES[rule](model.parameters()))


def _train(engine, batches, rank):
    with exact_square_roots():
        for tokens in batches:
            train_step(engine, tokens[rank])


def _states_of(engine):
    return [value for kept in engine.optimizer.state.values() for value in kept.values()
            if isinstance(value, torch.Tensor)]  # fmt: skip


def _is_on_host(engine):
    """Nothing of the optimizer's is in memory of a device that is apart from the host."""
    held = [engine.memory_report().get(("device", kind), (0, 0))[0] for kind in ("master weights", "optimizer state")]
    if engine.optimizer.inner is None:
        return held == [0, 0]
    lent = [p for group in engine.optimizer.inner.param_groups for p in group["params"]]
    return {t.device.type for t in lent + _states_of(engine)} == {"cpu"} and held == [0, 0]


def _trained(cases, accumulations, clippings):
    rank, world = rank_and_world()
    for (stage, dtype, name), accumulation, clipping in itertools.product(cases, accumulations, clippings):
        reference = PlainTrainer(make_model(), world, RULES[name], dtype=DTYPES[dtype], accumulation=accumulation,
                                 clipping=clipping, loss_scale=256.0 if dtype == "fp16" else 1.0, on_host=True)
        # Gathers of offloaded weights are NCCL's on GPUs, which wants one for each rank.
        weights_too = stage == 3 and (world == 1 or not shares_a_gpu())
        engine = _engine(name, dtype, accumulation, _zero(stage, weights_too), gradient_clipping=clipping)
        for index, tokens in enumerate(make_batches(3 * accumulation, world), 1):
            reference.micro_step(tokens, loss_of)
            _train(engine, [tokens], rank)
            if index % accumulation == 0:
                reference.step(norm=engine.get_global_grad_norm())
        case = (stage, dtype, name, accumulation, clipping)
        assert differences(full_parameters(engine.module), reference.values()) == [], case
        assert _is_on_host(engine), case
        assert engine.zero_offload_optimizer() == {"device": "cpu"} and engine.zero_cpu_offload()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_optimizer_of_the_users_updates_on_the_host(world):
    stages, dtypes = (3, 1 + world % 2), {1: "fp32", 2: "bf16", 3: "fp16"}
    cases = list(itertools.product(stages, (dtypes[world],), RULES))
    run_ranks(world, _trained, cases, (2,), (0.1 if world > 1 else 0.0,))


def _named_by_the_configuration():
    rank, world = rank_and_world()
    for stage, dtype in ((2, "fp32"), (3, "bf16")):
        rule = strata.ops.lion.DeepSpeedCPULion
        reference = PlainTrainer(make_model(), world, lambda p: rule(p, **LION), dtype=DTYPES[dtype], on_host=True)
        named = {"optimizer": {"type": "Lion", "params": LION}}
        engine = make_engine(make_model(), config_of(stage, dtype, zero_optimization=_zero(stage)) | named)
        for tokens in make_batches(3, world):
            reference.micro_step(tokens, loss_of)
            _train(engine, [tokens], rank)
            reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == [], stage
        assert _is_on_host(engine)
        engine.destroy()


def test_lion_of_the_configuration_may_be_offloaded():
    run_ranks(2, _named_by_the_configuration)


def _written():
    """A script writes weights between steps, and a step overflows: the masters on the host follow, or stay."""
    rank, world = rank_and_world()
    for stage, dtype in ((1, "fp16"), (2, "bf16"), (2, "fp32")):
        scale = 256.0 if dtype == "fp16" else 1.0
        reference = PlainTrainer(make_model(), world, RULES["momentum"], dtype=DTYPES[dtype], loss_scale=scale,
                                 on_host=True)
        engine = _engine("momentum", dtype, zero=_zero(stage))
        for step, tokens in enumerate(make_batches(5, world)):
            if step == 2:  # one that is dropped
                loss = loss_of(engine, tokens[rank])
                engine.backward(loss * float("inf"))
                engine.step()
                assert not engine.was_step_applied()
                continue
            reference.micro_step(tokens, loss_of)
            _train(engine, [tokens], rank)
            reference.step()
            engine.core.wait_for_all()
            masters = dict(zip(dict(reference.model.named_parameters()), reference.masters, strict=True))
            with torch.no_grad():
                for parameters in (dict(engine.module.named_parameters()), dict(reference.model.named_parameters())):
                    parameters["layers.0.up.weight"].fill_(0.25 / (step + 1))
                    parameters["head.bias"].clamp_(max=0.0)
                masters["layers.0.up.weight"].fill_(0.25 / (step + 1))
                masters["head.bias"].clamp_(max=0.0)
        assert differences(full_parameters(engine.module), reference.values()) == [], (stage, dtype)
        engine.destroy()


def test_weights_that_a_script_writes_and_steps_that_are_dropped_count_as_without_offload():
    run_ranks(2, _written)


KEPT = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq"}


def _everything(engine, name):
    get = strata.utils.safe_get_full_optimizer_state
    parameters = [p for n, p in engine.module.named_parameters() if n != "none"]
    states = [get(p, KEPT[name]).cpu() for p in parameters]
    return states + [strata.utils.safe_get_full_fp32_param(p).cpu() for p in parameters]


def _saved(folder, zero):
    rank, world = rank_and_world()
    batches, found = make_batches(4, 2), {}
    for name in KEPT:
        engine = _engine(name, "bf16", zero=zero)
        _train(engine, batches[:2], rank)
        engine.save_checkpoint(f"{folder}/{name}")
        state, found[name] = copy.deepcopy(engine.optimizer.state_dict()), _everything(engine, name)
        engine.offload_states()
        engine.reload_states()
        _train(engine, batches[2:], rank)
        expected = full_parameters(engine.module)
        engine.destroy()
        again = _engine(name, "bf16", zero=zero, seed=5)
        again.load_checkpoint(f"{folder}/{name}")
        again.optimizer.load_state_dict(state)
        _train(again, batches[2:], rank)
        assert differences(full_parameters(again.module), expected) == [], name
        again.destroy()
    return found


def _loaded(folder, zero, found):
    for name in KEPT:
        engine = _engine(name, "bf16", zero=zero, seed=5)
        engine.load_checkpoint(f"{folder}/{name}")
        assert all(map(same_bits, _everything(engine, name), found[name])), name
        engine.destroy()


def test_checkpoints_move_between_places_ranks_and_stages(tmp_path):
    """Offloaded states are saved, read and set, and training goes on with them; lent memory comes back."""
    for i, (saving, loading) in enumerate([(_zero(2), {"stage": 3}), ({"stage": 3}, _zero(1)), (_zero(3), _zero(2))]):
        found = run_ranks(2, _saved, f"{tmp_path}/{i}", saving)[0]
        run_ranks(1 + 2 * (i % 2), _loaded, f"{tmp_path}/{i}", loading, found)


def _partly():
    """The states of two units out of three are on the device."""
    rank, world = rank_and_world()
    engine = _engine("momentum", "bf16", zero=_zero(2, ratio=0.4))
    reference = PlainTrainer(make_model(), world, RULES["momentum"], dtype=torch.bfloat16, on_host=True)
    for tokens in make_batches(3, world):
        reference.micro_step(tokens, loss_of)
        _train(engine, [tokens], rank)
        reference.step()
    for name, value in full_parameters(engine.module).items():  # a GPU's own rounding of a product and a sum
        torch.testing.assert_close(value, reference.values()[name], rtol=1e-2, atol=1e-3)
    if not ON_GPU:
        assert differences(full_parameters(engine.module), reference.values()) == []
    engine.destroy()


def test_a_part_may_be_offloaded():
    run_ranks(2, _partly)


class _OfGpus(torch.optim.SGD):
    """Works on a GPU alone."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(not p.is_cuda for p in parameters):
            raise RuntimeError("kernels of this optimizer run on CUDA")
        super().step(closure)


@pytest.mark.skipif(not ON_GPU, reason="there is no device apart from the host")
def test_an_optimizer_that_does_not_run_on_the_host_is_refused_by_name():
    model = make_model()
    with pytest.raises(strata.UsageError, match="_OfGpus does not update on the host.*run on CUDA.*\"none\""):
        make_engine(model, config_of(2, optimizer=False, zero_optimization=_zero(2)),
                    optimizer=_OfGpus(model.parameters(), lr=0.1))


def _drive(folder, stage, **more):
    return {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **more}}


class _OwnRule(torch.optim.Optimizer):
    """A script's class, elementwise, with a state that counts its steps."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"], state["mean"] = 0, torch.zeros_like(p)
                state["steps"] += 1
                state["mean"].lerp_(p.grad, 0.25)
                p.sub_(state["mean"].sign() * group["lr"] / state["steps"])


RULES["own"] = lambda p: _OwnRule(p, lr=0.01)


def _trained_on_drives(folder, stage, dtype):
    rank, world = rank_and_world()
    for name in RULES:
        reference = PlainTrainer(make_model(), world, RULES[name], dtype=DTYPES[dtype], accumulation=2, clipping=0.1,
                                 on_host=True)
        engine = _engine(name, dtype, 2, _drive(folder, stage), gradient_clipping=0.1)
        for index, tokens in enumerate(make_batches(6, world), 1):
            reference.micro_step(tokens, loss_of)
            _train(engine, [tokens], rank)
            if index % 2 == 0:
                reference.step(norm=engine.get_global_grad_norm())
        assert differences(full_parameters(engine.module), reference.values()) == [], (stage, dtype, name)
        assert engine.zero_nvme_offload_optimizer()
        elements = sum(p.ds_numel if stage == 3 else p.numel() for p in engine.module.parameters())
        held = engine.memory_report()
        assert held["nvme", "optimizer state"][0] * world >= 4 * elements, held
        kept = [t for t in _states_of(engine) if t.dim() > 0]
        assert kept and all(t.untyped_storage().nbytes() == 4 for t in kept), "states stay in memory"
        engine.destroy()


@each_once({"world": [2, 1], "stage, dtype": [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")]})
def test_an_optimizer_of_the_users_rests_on_a_drive(tmp_path, world, stage, dtype):
    run_ranks(world, _trained_on_drives, tmp_path, stage, dtype)


def _named_on_a_drive(folder):
    """Classes that the configuration names, beside plain torch."""
    rank, world = rank_and_world()
    rule = strata.ops.lion.DeepSpeedCPULion
    for named, make in (({"type": "Lion", "params": LION}, lambda p: rule(p, **LION)),
                        ({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}, RULES["momentum"]),
                        ({"type": "Adagrad", "params": {"lr": 0.05}}, lambda p: torch.optim.Adagrad(p, lr=0.05))):
        reference = PlainTrainer(make_model(), world, make, on_host=True)
        engine = make_engine(make_model(), config_of(2, zero_optimization=_drive(folder, 2)) | {"optimizer": named})
        for tokens in make_batches(3, world):
            reference.micro_step(tokens, loss_of)
            _train(engine, [tokens], rank)
            reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == [], named
        engine.destroy()


def test_classes_that_the_configuration_names_rest_on_a_drive(tmp_path):
    run_ranks(2, _named_on_a_drive, tmp_path)


def test_checkpoints_move_between_a_drive_and_other_places(tmp_path):
    places = [(_drive(tmp_path, 2), {"stage": 3}), ({"stage": 3}, _drive(tmp_path, 1)), (_zero(3), _drive(tmp_path, 3)),
              (_drive(tmp_path, 3), _drive(tmp_path, 2))]  # fmt: skip
    for i, (saving, loading) in enumerate(places):
        found = run_ranks(2, _saved, f"{tmp_path}/{i}", saving)[0]
        run_ranks(1 + 2 * (i % 2), _loaded, f"{tmp_path}/{i}", loading, found)


def _sets_on_a_drive(folder):
    engine = _engine("momentum", "bf16", zero=_drive(folder, 2))
    _train(engine, make_batches(1, rank_and_world()[1]), 0)
    weight = engine.module.head.weight
    wanted = torch.rand_like(weight, dtype=torch.float32)
    strata.utils.safe_set_full_optimizer_state(weight, wanted, "momentum_buffer")
    assert same_bits(strata.utils.safe_get_full_optimizer_state(weight, "momentum_buffer"), wanted)
    assert not same_bits(strata.utils.safe_get_full_optimizer_state(engine.module.layers[0].up.weight,
                                                                    "momentum_buffer"), wanted)
    before = full_parameters(engine.module)
    engine.backward(loss_of(engine, make_batches(1, 1)[0, 0]) * float("inf"))
    engine.step()
    assert not engine.was_step_applied() and differences(full_parameters(engine.module), before) == []
    assert same_bits(strata.utils.safe_get_full_optimizer_state(weight, "momentum_buffer"), wanted)
    engine.destroy()


def test_states_on_a_drive_are_read_and_set_and_a_dropped_step_leaves_them(tmp_path):
    run_ranks(2, _sets_on_a_drive, tmp_path)


class _CountsCalls(torch.optim.SGD):
    """Its rate falls with each call."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["calls"])


class _Normed(torch.optim.SGD):
    """Its step depends on the norm of the whole gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


@pytest.mark.parametrize("rule, why", [(_CountsCalls, "called once for each tensor"), (_Normed, "two parts")])
def test_an_optimizer_that_cannot_be_called_unit_by_unit_is_refused_by_name(tmp_path, rule, why):
    model = make_model()
    with pytest.raises(strata.UsageError, match=f"{rule.__name__} cannot have its states on a drive.*{why}.*\"cpu\""):
        make_engine(model, config_of(1, optimizer=False, zero_optimization=_drive(tmp_path, 1)),
                    optimizer=rule(model.parameters(), lr=0.1))
