"""Settings of a configuration that count as under DeepSpeed."""

import logging

import pytest
import strata
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
