"""Settings of a configuration that count as under DeepSpeed."""

import logging

import pytest
import strata
from strata.compat.start import initialize
from strata.compat.zero_config import DeepSpeedZeroConfig
from tiny_models import config_of, make_engine, make_model


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
