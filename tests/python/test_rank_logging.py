"""The lines of the logger that a process shows by itself, also beside other handlers."""

import logging
import subprocess
import sys

import pytest
import strata
from ranks import run_ranks
from strata import rank_logging
from tiny_models import config_of, make_batches, make_engine, make_model, rank_and_world, train_step

HINT = {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 2}}


@pytest.fixture
def bare(monkeypatch):
    """A function that leaves the logger as in a plain script, without pytest's handlers; returns the logger."""
    logger, root = logging.getLogger("strata"), logging.getLogger()
    monkeypatch.setattr(rank_logging, "_shown", None)
    monkeypatch.delenv("STRATA_LOG_LEVEL", raising=False)
    level = logger.level

    def clear():  # pytest puts its handlers there once the test begins, and takes them away itself
        root.handlers.clear()
        logger.setLevel(logging.NOTSET)
        return logger

    yield clear
    if rank_logging._shown is not None:
        rank_logging._shown._retire()
    logger.setLevel(level)


def test_a_plain_script_sees_hints_and_what_is_missed_is_a_warning(bare, capsys):
    bare()
    engine = make_engine(make_model(), config_of(2, steps_per_print=1, **HINT))
    train_step(engine, make_batches(1, 1)[0, 0])
    engine.destroy()
    said = capsys.readouterr().err
    assert "strata: stage 2, the parameters' own dtypes, on cpu" in said
    assert "strata WARNING: settings without effect that ask for memory or output:\n" \
           "  activation_checkpointing.partition_activations: " in said
    assert "strata: accepted settings without effect:\n  activation_checkpointing.number_checkpoints: " in said
    assert said.count("strata: step=1, skipped=0, lr=[0.01]") == 1


@pytest.mark.parametrize("where", ["", "strata"])
@pytest.mark.parametrize("early", [True, False])
def test_a_program_that_configures_logging_gets_each_line_once(where, early, bare, capsys):
    logger = bare()
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    target = logging.getLogger(where)
    if early:
        target.addHandler(handler)
    rank_logging.show_logs()
    if not early:
        logger.info("before")
        target.addHandler(handler)
    try:
        logger.warning("told")
        logger.info("whispered")
    finally:
        target.removeHandler(handler)
    assert seen == ["told"], "the level is the program's"
    assert capsys.readouterr().err.count("\n") == (0 if early else 1)


def test_the_level_comes_from_the_environment_or_the_configuration(bare, capsys, monkeypatch):
    logger = bare()
    rank_logging.show_logs("warning")
    logger.info("hidden")
    monkeypatch.setenv("STRATA_LOG_LEVEL", "debug")
    rank_logging.show_logs("warning")
    logger.debug("shown")
    monkeypatch.setenv("STRATA_LOG_LEVEL", "loud")
    with pytest.raises(strata.ConfigError, match="STRATA_LOG_LEVEL: wanted one of debug, .*; found 'loud'"):
        rank_logging.show_logs()
    assert [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()] == ["strata DEBUG: shown"]
    monkeypatch.delenv("STRATA_LOG_LEVEL")
    with pytest.raises(strata.ConfigError, match="log_level: wanted one of debug"):
        make_engine(make_model(), config_of(0, log_level="loud"))


def test_a_level_that_a_script_has_set_stays(bare, capsys):
    logger = bare()
    logger.setLevel(logging.ERROR)
    rank_logging.show_logs("info")
    logger.warning("hidden")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_lines_by_rich(bare, monkeypatch, capsys):
    logger = bare()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    rank_logging.show_logs()
    logger.warning("a device is nearly full")
    said = capsys.readouterr().err
    assert "WARNING" in said and "strata: a device is nearly full" in said and "strata WARNING" not in said


def _says():
    rank, _ = rank_and_world()
    engine = make_engine(make_model(), config_of(2))
    logger = logging.getLogger("strata")
    logger.info("information of rank %d", rank)
    logger.warning("warning of rank %d", rank)
    rank_logging.log_dist("chosen", ranks=[1])
    engine.destroy()
    sys.stderr.flush()
    with open("/proc/self/fd/2") as log:
        return log.read()


def test_other_ranks_show_warnings_and_what_they_are_chosen_for():
    first, second = run_ranks(2, _says)
    assert "strata: information of rank 0" in first and "strata WARNING: warning of rank 0" in first
    assert "chosen" not in first
    assert [line.split(" ", 2)[2] for line in second.splitlines() if "strata" in line] == [
        "strata WARNING: warning of rank 1", "strata: [Rank 1] chosen"
    ]


def test_importing_configures_nothing():
    code = "import logging, strata, strata.rank_logging as r; print(logging.getLogger('strata').handlers, r._shown)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[] None\n"
