"""The engine adopts rank 0's values of a live model, whatever values the other ranks' models have."""

import gc
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import strata
import torch
from devices import ON_GPU, test_device
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from soak import also, each_once
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    full_parameters,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)

DIFFERENCES = {
    "nothing": lambda model: None,
    "one element of a large parameter": lambda model: model.large.view(-1)[5_000_000].add_(1.0),
    "the last element": lambda model: model.large.view(-1)[-1].add_(1.0),
    "a parameter that is not contiguous": lambda model: model.turned[3, 1].add_(1.0),
    "a frozen one of bytes": lambda model: model.frozen[2].add_(1),
    "everything": lambda model: [p.add_(1) for p in model.parameters()],
}


TIERS = ["device_copy", "device_grow", "distributed", "host"]


class Odd(torch.nn.Module):
    """Parameters of several pieces, of none, of a few bytes, and one whose memory is not in its own order."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.none = torch.nn.Parameter(torch.zeros(0))
        self.frozen = torch.nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
        self.large = torch.nn.Parameter(torch.randn(5001, 1003, generator=generator))  # 19 MiB
        self.turned = torch.nn.Parameter(torch.randn(7, 9, generator=generator).t())
        self.narrow = torch.nn.Parameter(torch.randn(3, generator=generator).bfloat16())


def _values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _adopted(kind, stage, on_host, tier="auto", dtype="fp32"):
    rank, _ = rank_and_world()
    model = Odd().to("cpu" if on_host in ("all", f"rank {rank}") else test_device())
    expected = {name: value.to(test_device()) for name, value in _values(model).items()}
    if rank > 0:
        with torch.no_grad():
            DIFFERENCES[kind](model)
    engine = make_engine(model, config_of(stage, dtype, live_bytes=1, strata={"init": {"tier": tier}}))
    assert tier in ("auto", engine.init_report["tier"])
    ours = full_parameters(model)
    for name, value in expected.items():
        if value.is_floating_point() and dtype != "fp32":  # without a precision each keeps its own
            expected[name] = value.to(DTYPES[dtype])
    assert differences(ours, expected) == []
    engine.destroy(keep_values=True)
    assert differences(_values(model), expected) == []


@pytest.mark.parametrize("on_host", ["all", "none", "rank 0", "rank 1"] if ON_GPU else ["all"])
@each_once({"stage": [1, 3], "kind": DIFFERENCES})
def test_rank_0s_values_arrive_bit_for_bit(kind, stage, on_host):
    run_ranks(2, _adopted, kind, stage, on_host)


def _adopted_from_rank_0(kind, stage, dtype):
    rank, _ = rank_and_world()
    model = Odd()
    expected = {name: value.to(test_device()) for name, value in _values(model).items()}
    if rank > 0:
        with torch.no_grad():
            DIFFERENCES[kind](model)
    engine = make_engine(model, config_of(stage, dtype, live_bytes=1))
    phases = [phase["name"] for phase in engine.init_report["phases"]]
    assert "move in" in phases and "compare ranks" not in phases
    for name, value in expected.items():
        if value.is_floating_point() and dtype != "fp32":  # without a precision each keeps its own
            expected[name] = value.to(DTYPES[dtype])
    assert differences(full_parameters(model), expected) == []
    engine.destroy(keep_values=True)
    assert differences(_values(model), expected) == []


@pytest.mark.skipif(not ON_GPU, reason="where host and device are one, nothing is moved in")
@pytest.mark.parametrize("stage, dtype", [(1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_of_one_host_read_rank_0s_values_where_they_are(world, stage, dtype):
    run_ranks(world, _adopted_from_rank_0, "everything", stage, dtype)


@contextmanager
def _another_process_has_the_same_pages():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    yield
    os.close(write)
    os.waitpid(child, 0)


def _gathered_after_the_comparison(kind):
    model = Odd()
    if rank_and_world()[0] > 0:
        with torch.no_grad():
            DIFFERENCES[kind](model)
    with _another_process_has_the_same_pages():
        engine = make_engine(model, config_of(2))
    assert "rank 0: another process has the same pages" in engine.init_report["reason"]
    gathered = next(phase["bytes"] for phase in engine.init_report["phases"] if phase["name"] == "all-gather")
    engine.destroy()
    return gathered


@pytest.mark.skipif(not ON_GPU, reason="where host and device are one, nothing is moved in")
def test_a_model_that_another_process_has_too_is_gathered_beside_the_comparison_and_again_where_ranks_differ():
    assert set(run_ranks(2, _gathered_after_the_comparison, "nothing")) == {0}
    assert min(run_ranks(2, _gathered_after_the_comparison, "the last element")) > 0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_any_number_of_ranks_takes_the_values_in(world, stage):
    run_ranks(world, _adopted, "everything", stage, "none")


@each_once({"world": [2, 1], "stage": [1, 3], "kind": ["nothing", "one element of a large parameter", "everything"],
            "tier": TIERS})
def test_every_way_brings_the_same_bits(world, tier, kind, stage):
    run_ranks(world, _adopted, kind, stage, "none", tier)


def _adopted_every_way(kinds):
    for tier in TIERS:
        for stage, dtype in ((1, "bf16"), (3, "fp32"), (3, "bf16")):
            for kind in kinds:
                _adopted(kind, stage, "none", tier, dtype)


@pytest.mark.parametrize("world", [3, *also(8)])
def test_every_way_brings_the_same_bits_to_many_ranks(world):
    run_ranks(world, _adopted_every_way, ["one element of a large parameter"])


def _others_bring(stage, built_otherwise):
    rank, _ = rank_and_world()
    model = Odd().to(test_device())
    if rank == 1:
        built_otherwise(model)
    before = _values(model)
    with pytest.raises(strata.ConfigError, match="the ranks have different models.*rank 0 has .*rank 1 has"):
        make_engine(model, config_of(stage))
    assert differences(_values(model), before) == []


def _in_another_dtype(model):
    model.large.data = model.large.data.bfloat16()


def _larger(model):
    model.narrow.data = model.narrow.data.new_zeros(4, dtype=torch.bfloat16)


@pytest.mark.parametrize("built_otherwise", [_in_another_dtype, _larger])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_different_models_are_told_so_before_anything_moves(stage, built_otherwise):
    run_ranks(2, _others_bring, stage, built_otherwise)


# --- values that are views of mapped files, as safetensors and torch.load(mmap=True) give them ---


def _by_safetensors(values, folder):
    path = folder / "model.safetensors"
    save_file(values, path)
    with safe_open(path, "pt") as file:
        return path, {name: _parameter(file.get_tensor(name)) for name in file.keys()}


def _parameter(values):
    return torch.nn.Parameter(values, requires_grad=False)  # is no view: a view would keep its base


def _by_torch(values, folder):
    path = folder / "model.pt"
    torch.save(values, path)
    return path, {name: _parameter(value) for name, value in torch.load(path, mmap=True).items()}


BOTH = pytest.mark.parametrize("mapped", [_by_safetensors, _by_torch])


def _on_host(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@BOTH
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_mapped_values_trains_and_its_file_goes(mapped, stage, tmp_path):
    tokens = make_batches(1, 1)[0]
    outcomes = []
    for is_mapped in (False, True):
        model = make_model()
        if is_mapped:
            path, values = mapped(_on_host(model), tmp_path)
            model.load_state_dict(values, assign=True)
            del values
            assert _is_mapped(path)
        engine = make_engine(model, config_of(stage))
        train_step(engine, tokens[0])
        outcomes.append(full_parameters(model))
        engine.destroy()
    del engine
    gc.collect()
    assert not differences(*outcomes)
    assert not _is_mapped(path)


def test_values_that_the_user_keeps_stay_readable(tmp_path):
    model = make_model()
    path, parameters = _by_safetensors(_on_host(model), tmp_path)
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    model.load_state_dict(values, assign=True)
    before = {name: value.clone() for name, value in values.items()}
    engine = make_engine(model, config_of(3))
    assert all(torch.equal(values[name], value) for name, value in before.items())
    engine.destroy()
    assert all(torch.equal(values[name], value) for name, value in before.items()) and _is_mapped(path)
