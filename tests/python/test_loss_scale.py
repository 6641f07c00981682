"""fp16: the loss scale moves as DeepSpeed's does, and a step that overflows anywhere is skipped everywhere."""

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
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


class DeepSpeedScale:
    """The published rule: halve on overflow once hysteresis is used up, double after a quiet window."""

    def __init__(self, scale, window, hysteresis, minimum, consecutive):
        self.scale, self.window, self.minimum = scale, window, minimum
        self.delay = self.left = hysteresis
        self.consecutive, self.iteration, self.last_overflow = consecutive, 0, -1

    def update(self, overflow):
        if overflow:
            if self.delay == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.left = self.delay
            quiet = self.iteration - self.last_overflow - 1
            if quiet > 0 and quiet % self.window == 0:
                if not self.consecutive:
                    self.left = self.delay
                self.scale *= 2
        self.iteration += 1


def _overflowing(model, tokens):
    return loss_of(model, tokens) * float("inf")


def _train_through(overflows, section, stage):
    rank, world = rank_and_world()
    rule = DeepSpeedScale(2.0 ** section["initial_scale_power"], section["loss_scale_window"],
                          section["hysteresis"], section.get("min_loss_scale", 1),
                          section.get("consecutive_hysteresis", False))
    reference = PlainTrainer(make_model(), world, adamw, torch.float16)
    config = config_of(stage, "fp16", fp16=section, scheduler={"type": "WarmupLR", "params": {
        "warmup_min_lr": 1e-2, "warmup_max_lr": 1e-2}})
    engine = make_engine(make_model(), config)
    skipped = 0
    for step, tokens in enumerate(make_batches(len(overflows), world)):
        assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == rule.scale, f"before step {step}"
        reference.loss_scale = rule.scale
        reference.micro_step(tokens, loss_of)
        overflow = overflows[step]
        # One rank alone is enough.
        train_step(engine, tokens[rank], _overflowing if overflow and rank == world - 1 else loss_of)
        skipped += overflow
        assert engine.optimizer.overflow is bool(overflow)
        assert engine.was_step_applied() is not bool(overflow)
        assert (engine.skipped_steps, engine.global_steps) == (skipped, step + 1)
        if overflow:
            reference.drop_gradients()
        else:
            reference.step(engine.get_global_grad_norm())
        assert engine.lr_scheduler.state_dict()["last_batch_iteration"] == step - skipped
        assert differences(full_parameters(engine.module), reference.values()) == [], f"step {step}"
        rule.update(bool(overflow))
    engine.destroy()


SECTIONS = {
    "defaults of hysteresis": {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2},
    "at once": {"initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1},
    "consecutive": {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2, "consecutive_hysteresis": True},
    "floor": {"initial_scale_power": 9, "loss_scale_window": 100, "hysteresis": 1, "min_loss_scale": 24},
}


def _all_patterns(section):
    for stage, overflows in ((0, [1, 0, 0, 1, 1, 0, 0, 0]), (3, [0, 1, 1, 1, 0, 1, 0, 0]), (2, [1, 1, 1, 1, 0, 0])):
        _train_through(overflows, {"enabled": True, "loss_scale": 0, **section}, stage)


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_the_dynamic_scale_moves_as_deepspeeds(name):
    run_ranks(2, _all_patterns, SECTIONS[name])


def _static_scale():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, "fp16", fp16={"enabled": True, "loss_scale": 64}))
    for step, tokens in enumerate(make_batches(4, world)):
        train_step(engine, tokens[rank], _overflowing if step == 1 else loss_of)
        assert engine.optimizer.loss_scale == 64.0
        assert engine.optimizer.overflow is (step == 1)


def test_a_static_scale_stays():
    run_ranks(2, _static_scale)


def _hopeless():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, "fp16", fp16={
        "enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}))
    for tokens in make_batches(8, world):
        train_step(engine, tokens[rank], _overflowing)


def test_overflow_at_the_smallest_scale_is_an_error():
    with pytest.raises(strata.LossScaleError, match="loss scale is at its minimum"):
        run_ranks(2, _hopeless)
