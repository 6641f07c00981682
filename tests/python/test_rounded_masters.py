"""bf16_master_weights_and_grads and bf16_optimizer_states: the update's states are rounded after each step."""

import pytest
import strata
import torch
from comparison import adamw, compare
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata import utils
from test_errors import error_of
from tiny_models import (
    config_of,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)


class RoundingTrainer(PlainTrainer):
    """Rounds the masters, and the moments where asked, to bf16 after each step."""

    def __init__(self, *args, rounds_moments, **kwargs):
        super().__init__(*args, **kwargs)
        self.rounds_moments = rounds_moments
        self._round(self.masters)

    def step(self, norm=None):
        super().step(norm)
        self._round(self.masters)
        if self.rounds_moments:
            states = self.optimizer.state.values()
            self._round([state[name] for state in states for name in ("exp_avg", "exp_avg_sq")])

    @staticmethod
    def _round(tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(tensor.bfloat16())


def _config(stage, states, **more):
    bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}
    return config_of(stage, "bf16", bf16=bf16, **more)


def _as_the_plain_loop():
    _, world = rank_and_world()
    for stage in range(4):
        for states in (False, True):
            kept = {"data_types": {"grad_accum_dtype": "fp32"}} if stage == 1 else {}
            reference = RoundingTrainer(
                make_model(), world, adamw, torch.bfloat16, clipping=0.05, accumulation=2, rounds_moments=states,
                grad_accum_dtype=torch.float32 if kept else torch.bfloat16)
            compare(_config(stage, states, accumulation=2, clipping=0.05, **kept), reference, steps=3)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_trains_with_the_bits_of_the_plain_loop(world):
    run_ranks(world, _as_the_plain_loop)


def _looked_at():
    rank, world = rank_and_world()
    for states in (False, True):
        model = make_model()
        engine = make_engine(model, _config(3, states))
        assert engine.bf16_master_weights_and_gradients() is True and engine.bf16_optimizer_states() is states
        weight = model.layers[1].up.weight
        batches = make_batches(2, world)
        train_step(engine, batches[0][rank])
        master = utils.safe_get_full_fp32_param(weight)
        assert master.dtype == torch.float32
        assert torch.equal(master, full_parameters(model)["layers.1.up.weight"].float())
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert moment.dtype == torch.float32 and moment.abs().sum() > 0
        assert torch.equal(moment, moment.bfloat16().float()) is states
        utils.safe_set_full_fp32_param(weight, master * 0.3)
        utils.safe_set_full_optimizer_state(weight, moment * 0.3, "exp_avg")
        after = utils.safe_get_full_fp32_param(weight)
        assert torch.equal(after, (master * 0.3).bfloat16().float())
        expected = (moment * 0.3).bfloat16().float() if states else moment * 0.3
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), expected)
        memory = engine.memory_report()
        held = {kind: memory["device", kind][0] for kind in ("master weights", "optimizer state", "weights")}
        assert held["master weights"] == 0, held
        forecast = engine.memory_forecast()
        assert forecast["optimizer state"] == held["optimizer state"] and forecast["master weights"] == 0
        engine.backward(loss_of(engine, batches[1][rank]) * float("inf"))
        engine.step()
        assert not engine.was_step_applied() and torch.equal(utils.safe_get_full_fp32_param(weight), after)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_kept_is_read_set_and_counted(world):
    run_ranks(world, _looked_at)


def test_what_does_not_go_together_is_named():
    def of(bf16, **more):
        config = config_of(2, "bf16", bf16=bf16, optimizer=False, **more)
        optimizer = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        return error_of(strata.initialize, model=make_model(), config=config, **optimizer)

    assert "bf16.bf16_optimizer_states: needs bf16.bf16_master_weights_and_grads" in of({"bf16_optimizer_states": True})
    assert "bf16.bf16_master_weights_and_grads: is for bf16 weights" in of(
        {"enabled": False, "bf16_master_weights_and_grads": True})
    assert of({"bf16_master_weights_and_grads": True}).startswith(
        "ConfigError: bf16.bf16_master_weights_and_grads: is for Adam, AdamW and Lion")
