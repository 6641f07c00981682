"""Settings of a configuration that count as under DeepSpeed."""

import logging

import pytest
import strata
import torch
from strata.compat.config import DeepSpeedZeroConfig
from strata.compat.engine import initialize
from tiny_models import config_of, loss_of, make_batches, make_engine, make_model


def test_a_wrong_configuration_is_a_value_error():
    with pytest.raises(ValueError, match="optimiser"):
        strata.initialize(model=make_model(), config={"train_batch_size": 1, "optimiser": {"type": "Adam"}})


def test_the_log_level_of_the_configuration_counts():
    logger = logging.getLogger("strata")
    before = logger.level
    try:
        engine = make_engine(make_model(), config_of(0, log_level="ERROR"))
        assert logger.level == logging.ERROR and engine.log_level() == "error"
        engine.destroy()
        engine, *_ = initialize(model=make_model(), config=config_of(0, log_level="ERROR"))
        assert engine.log_level() == "ERROR"
        engine.destroy()
        with pytest.raises(strata.ConfigError, match="log_level"):
            make_engine(make_model(), config_of(0, log_level="loud"))
    finally:
        logger.setLevel(before)


def test_errors_are_of_the_classes_that_deepspeed_raises():
    assert issubclass(strata.ConfigError, ValueError) and issubclass(strata.UsageError, AssertionError)
    assert issubclass(strata.ConfigError, strata.Error) and issubclass(strata.UsageError, RuntimeError)
    engine = make_engine(make_model(), config_of(1))
    with pytest.raises(AssertionError, match="backward"):
        engine.step()
    engine.destroy()
    engine, optimizer, *_ = initialize(model=make_model(), config=config_of(1))
    for nowhere in (None, ""):
        with pytest.raises(ValueError, match="folder"):
            engine.save_checkpoint(nowhere)
    optimizer.set_lr(0.5)
    assert optimizer.get_lr() == 0.5 and engine.get_lr() == [0.5] and not engine.sparse_tensor_module_names
    engine.destroy()


def test_leaf_modules_are_lists():
    leaf = DeepSpeedZeroConfig(leaf_module={"names": "head"}).leaf_module
    assert leaf.names == ["head"] and leaf.name_suffixes == [] and len(leaf.classes) == 3


class _OneInside(torch.optim.Optimizer):
    """An optimizer by another one, whose param groups it shows or not."""

    def __init__(self, params, shown):
        super().__init__(params, {})
        self.inside = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5)
        if shown:
            self.param_groups = self.inside.param_groups

    def step(self, closure=None):
        self.inside.step()


class _OwnRate(torch.optim.Optimizer):
    """An optimizer whose rate is in no param group."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.5)


def test_an_optimizer_that_updates_by_another_trains_or_is_refused():
    tokens, plain, model = make_batches(1, 1)[0, 0], make_model(), make_model()
    loss_of(plain, tokens).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    config = config_of(0, optimizer=False, steps_per_print=1)
    for inside in (_OneInside(model.parameters(), shown=False), torch.optim.Adam(model.parameters())):
        hidden = _OwnRate(model.parameters(), {})
        hidden.several = [inside]
        with pytest.raises(strata.UsageError, match="would train nothing.*found several"):
            initialize(model=model, optimizer=hidden, config=config)
    with pytest.raises(strata.UsageError, match="self.param_groups = self.inside.param_groups"):
        initialize(model=model, optimizer=_OneInside(model.parameters(), shown=False), config=config)
    for make, rate in ((lambda p: _OneInside(p, shown=True), 0.5), (lambda p: _OwnRate(p, {}), 0.0)):
        model = make_model()
        engine, *_ = initialize(model=model, optimizer=make(model.parameters()), config=config)
        engine.backward(loss_of(engine, tokens))
        engine.step()
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert engine.get_lr() == [rate]
        engine.destroy()
