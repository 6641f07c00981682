"""States that rest on the host are cached in free memory of a GPU, and given back when torch wants it."""

import pathlib

import pytest
import torch
from devices import ON_GPU
from offloaded_training import all_offloaded, config_of, make_model, train_steps, whole_states, whole_weights
from ranks import run_ranks

import strata

STEPS = 6
ROWS = 500_000  # of 48: 24 million parameters


def _cached(engine):
    return engine.step_report()["offload"]["cached_bytes"]


def _trained(config, **strata_section):
    engine, *_ = strata.initialize(model=make_model(ROWS), config=config | {"strata": strata_section})
    train_steps(engine, STEPS)
    return engine


def _take_all_memory():
    """As much as the driver has free, and more, which torch gets only if the cache goes."""
    for size in (2**29, 2**30, 2**31):  # which stays free: tests of other processes may take some meanwhile
        try:
            free = torch.cuda.mem_get_info()[0]
            return torch.empty(free - size, dtype=torch.uint8, device="cuda"), torch.empty(2**27, device="cuda")
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    pytest.fail("other processes keep taking the GPU's memory")


def _trains_with_a_cache(folder, config):
    plain = _trained(config, state_cache=0)
    assert _cached(plain) == 0
    train_steps(plain, 2, STEPS)
    expected = [*whole_weights(plain), *whole_states(plain)]
    plain.destroy()
    for grows in (False, True):
        engine = _trained(config)
        held = _cached(engine)
        assert held > 8 * 48 * ROWS
        before = engine.memory_report()["device", "optimizer state"][0]
        if grows:
            tensors = _take_all_memory()
            assert engine.memory_report()["device", "optimizer state"][0] == 0 < before
            del tensors
            torch.cuda.empty_cache()
        else:
            engine.save_checkpoint(folder, tag="cached")
        train_steps(engine, 2, STEPS)
        found = [*whole_weights(engine), *whole_states(engine)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), grows
        engine.destroy()
    loaded, *_ = strata.initialize(model=make_model(ROWS), config=config | {"strata": {"state_cache": 0}})
    loaded.load_checkpoint(folder, tag="cached")
    train_steps(loaded, 2, STEPS)
    found = [*whole_weights(loaded), *whole_states(loaded)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU and STRATA_TEST_DEVICE=cuda")
@pytest.mark.parametrize("params", ["none", "cpu"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_states_are_cached_and_given_back(params, micro_steps, tmp_path):
    config = all_offloaded(params, "cpu", tmp_path) | {"gradient_accumulation_steps": micro_steps}
    run_ranks(1, _trains_with_a_cache, str(tmp_path / "saved"), config, alone=True)


def _has_none(folder):
    engine = _trained(config_of("cpu", folder, 3))
    report = engine.step_report()["offload"]
    assert not report or report["cached_bytes"] == 0


@pytest.mark.skipif(ON_GPU, reason="is about ranks on the host")
def test_ranks_on_the_host_have_no_cache(tmp_path):
    run_ranks(1, _has_none, str(tmp_path))


def test_torch_tells_when_it_grows():
    """By the name that the engine looks for: without it there is no cache."""
    library = pathlib.Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if not library.exists():
        pytest.skip("torch has no CUDA")
    name = b"_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev"
    assert name in library.read_bytes()


def test_the_key_is_checked():
    with pytest.raises(strata.ConfigError, match="strata.state_cache"):
        strata.initialize(model=make_model(ROWS), config=config_of("cpu", "/tmp", 3) | {"strata": {"state_cache": -1}})
