"""``load_pretrained`` imports the model's class and opens the device while ranks are still connecting. A failure of
either is an error of the start, and neither runs on after it."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import strata
import torch
import transformers
from hf_models import MODELS
from ranks import run_ranks
from strata import pretrained
from tiny_models import config_of

AFTER_A_FAILURE = """
import sys, threading
import strata
try:
    strata.load_pretrained(sys.argv[1], {"train_micro_batch_size_per_gpu": 1})
except Exception as error:
    print(type(error).__name__, error)
print(sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    MODELS["qwen3"].build().save_pretrained(folder)
    return folder


def _running():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("strata")]


def test_the_class_and_the_device_are_there_while_ranks_are_still_connecting(checkpoint, monkeypatch):
    imported, opened = threading.Event(), threading.Event()
    import_class, open_runtime = pretrained._import_class, pretrained.open_runtime

    def noting(event, call):
        def noted(*args):
            result = call(*args)
            event.set()
            return result
        return noted

    def connect():
        assert imported.wait(60) and opened.wait(60)

    monkeypatch.setattr(pretrained, "_import_class", noting(imported, import_class))
    monkeypatch.setattr(pretrained, "open_runtime", noting(opened, open_runtime))
    monkeypatch.setitem(strata.initialize.__globals__, "init_distributed", connect)
    engine, *_ = strata.load_pretrained(checkpoint, config_of(2))
    engine.destroy()
    assert _running() == []


def test_ranks_that_cannot_connect_leave_nothing_running(checkpoint, monkeypatch):
    def connect():
        raise RuntimeError("the store cannot be reached")

    monkeypatch.setitem(strata.initialize.__globals__, "init_distributed", connect)
    with pytest.raises(RuntimeError, match="the store cannot be reached"):
        strata.load_pretrained(checkpoint, config_of(2))
    assert _running() == []


def test_a_rank_that_is_told_no_store_ends_with_the_launchers_variable(checkpoint):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    result = subprocess.run([sys.executable, "-c", AFTER_A_FAILURE, str(checkpoint)], capture_output=True, text=True,
                            env={**environment, "RANK": "1", "WORLD_SIZE": "2"}, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    failure, threads = result.stdout.splitlines()
    assert "MASTER_ADDR" in failure and threads == "['MainThread']"


def test_a_folder_that_is_not_there_is_asked_of_nobody_else(monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(strata.Error, match="absent/nothing"):
        strata.load_pretrained("absent/nothing", config_of(2))
    assert _running() == []


def _errors_of(path, configs):
    """[(class, message)] of the error that loading raises, or None; a case has a configuration for each rank."""
    errors = []
    for of_ranks in configs:
        try:
            engine, *_ = strata.load_pretrained(path, of_ranks[int(os.environ["RANK"])])
            engine.destroy()
            errors.append(None)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        assert _running() == []
    return errors


def test_a_configuration_that_is_wrong_on_one_rank_is_an_error_on_every_rank(checkpoint):
    wrong = [config_of(2, zero_optimization={"stage": 7}), config_of(2, strata={"device": "abacus"})]
    (first, second), (stage, device) = run_ranks(2, _errors_of, checkpoint, [[config_of(2), bad] for bad in wrong])
    assert stage[0] == "ConfigError" and "stage" in stage[1]
    assert device[0] == "ConfigError" and "abacus" in device[1]
    for told, own in ((first, stage), (second, device)):
        assert told[0] == "CommError" and "rank 1 failed" in told[1] and own[1] in told[1]


def _opened(device, dtype=None):
    opening = Future()
    opening.set_result((SimpleNamespace(dtype=dtype), SimpleNamespace(device=device)))
    return opening


@pytest.mark.parametrize("dtype, loaded", [(None, torch.bfloat16), ("float16", torch.float16)])
def test_what_a_first_step_loads_is_loaded_for_gpus_and_may_fail(dtype, loaded, monkeypatch):
    seen = []

    def fail(*args):
        seen.append(args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pretrained._C, "warm_up", fail)
    pretrained.warm_up(_opened(torch.device("cpu"), dtype))
    assert seen == []
    pretrained.warm_up(_opened(torch.device("cuda", 0), dtype))
    assert seen == [(torch.device("cuda", 0), loaded)]
    failed = Future()
    failed.set_exception(strata.ConfigError("told by who asks for the runtime"))
    pretrained.warm_up(failed)
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_warm_up_computes_and_leaves_the_random_numbers_as_they_were(dtype):
    before = torch.get_rng_state()
    strata._C.warm_up(torch.device("cpu"), dtype)
    assert torch.equal(torch.get_rng_state(), before)
