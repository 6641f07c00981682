"""Schedules as classes, over any torch optimizer; their values are compared with DeepSpeed's in tests/engine."""

import pytest
import strata
import torch
from strata import schedule
from tiny_models import config_of, make_batches, make_model, train_step

CASES = {
    "WarmupLR": {"warmup_max_lr": [0.25, 0.5], "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.125, "cycle_max_lr": 0.5, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_step_size": 2, "lr_range_test_staircase": True},
}


def _optimizer(cls=torch.optim.AdamW):
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    return cls([{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]], "lr": 0.2}])


def _rates(made, steps):
    rates = []
    for _ in range(steps):
        made.step()
        rates.append((made.get_lr(), made.get_last_lr(), [g.get("betas") for g in made.optimizer.param_groups]))
    return rates


@pytest.mark.parametrize("name", CASES)
def test_a_class_is_what_the_configuration_names_alike(name):
    made = getattr(schedule, name)(_optimizer(), **CASES[name])
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "scheduler": {"type": name, "params": CASES[name]}}
    same = strata.ScheduledLR(strata.config_source.read_config(config), _optimizer())
    assert made.get_last_lr() == same.get_last_lr()
    assert _rates(made, 12) == _rates(same, 12)


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_brings_another_one_to_the_same_place(name):
    made = getattr(schedule, name)(_optimizer(), **CASES[name])
    _rates(made, 5)
    other = getattr(schedule, name)(_optimizer(), **CASES[name])
    other.load_state_dict(made.state_dict())
    assert made.last_batch_iteration == other.last_batch_iteration
    assert _rates(made, 3) == _rates(other, 3)


def test_arguments_may_be_positional_and_subclassed():
    class Own(schedule.WarmupDecayLR):
        """A script's own subclass."""

    by_name = schedule.WarmupDecayLR(_optimizer(), total_num_steps=9, warmup_min_lr=0.1, warmup_max_lr=0.3,
                                     warmup_num_steps=2, warmup_type="linear")
    assert _rates(Own(_optimizer(), 9, 0.1, 0.3, 2, "linear"), 6) == _rates(by_name, 6)


def test_one_cycle_leaves_an_optimizer_without_betas_alone():
    made = schedule.OneCycle(_optimizer(torch.optim.SGD), 0.125, 0.5)
    assert all(betas == [None, None] for _, _, betas in _rates(made, 3))


@pytest.mark.parametrize("make, words", [
    (lambda o: schedule.WarmupLR(o, warmup_num_steps=0), "scheduler.params.warmup_num_steps: wanted an integer > 0"),
    (lambda o: schedule.WarmupLR(o, warmup_type="cubic"), "scheduler.params.warmup_type: wanted one of log, linear"),
    (lambda o: schedule.WarmupDecayLR(o, "auto"), 'scheduler.params.total_num_steps: "auto"'),
    (lambda o: schedule.WarmupLR(o, warmup_max_lr=[0.1]), "scheduler.params.warmup_max_lr"),
    (lambda o: schedule.OneCycle(o, None, 0.1), "scheduler.params.cycle_min_lr: OneCycle needs"),
])
def test_wrong_arguments_are_refused_by_name(make, words):
    with pytest.raises(strata.ConfigError, match=words):
        make(_optimizer())


def test_the_engine_steps_one_that_a_script_made():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = schedule.WarmupLR(optimizer, 0.0, 0.5, 2, "linear")
    engine, _, _, returned = strata.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(2, optimizer=False)
    )
    assert returned is scheduler
    rates = []
    for tokens in make_batches(3, 1):
        rates.append(engine.get_lr())
        train_step(engine, tokens[0])
    assert rates == [[0.0], [0.0], [0.25]]
    engine.destroy()
