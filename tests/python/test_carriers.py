"""Gathers and reductions that are carried apart: strata.gather and strata.reduce, and the probe that chooses.

On the CPU gloo stands where NCCL does on GPUs.
"""

import logging
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from comparison import adamw, compare
from devices import ON_GPU, needs_a_gpu_each, test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import also
from test_errors import assert_told, error_of
from tiny_models import config_of, make_batches, make_engine, make_model, rank_and_world, train_step

import strata
from strata.ranks import runtime

SPLIT = [("peer", "nccl"), ("nccl", "peer")]


@contextmanager
def _both_carriers(nccl_runs=True):
    """The choice of GPUs, on the CPU, too."""
    if ON_GPU:
        yield
        return
    facts, new_backend = runtime._facts, runtime._new_backend

    def as_of_a_gpu(device):
        return facts(device) | {"on_gpu": True, "has_nccl": True, "nccl_runs": nccl_runs}

    def gloo(_, *rest, **timeout):
        return new_backend("gloo", *rest, **timeout)

    with mock.patch.object(runtime, "_facts", as_of_a_gpu), mock.patch.object(runtime, "_new_backend", gloo):
        yield


def _config(gather, reduce, dtype="bf16", stage=3, collectives="peer", **more):
    return config_of(stage, dtype, strata={"collectives": collectives, "gather": gather, "reduce": reduce}, **more)


# --- numbers ---


def _bits(gather, reduce):
    _, world = rank_and_world()
    with _both_carriers():
        for stage, accumulation, clipping in ((3, 1, 0.05), (3, 4, 0.0), (2, 2, 0.05)):
            reference = PlainTrainer(make_model(), world, adamw, torch.bfloat16, clipping, accumulation)
            compare(_config(gather, reduce, stage=stage, accumulation=accumulation, clipping=clipping), reference)


@needs_a_gpu_each
@pytest.mark.parametrize("gather, reduce", SPLIT)
def test_two_carriers_have_the_bits_of_plain_torch(gather, reduce):
    """Two terms have the same sum in any order."""
    run_ranks(2, _bits, gather, reduce)


def _trained(gather, reduce):
    rank, world = rank_and_world()
    with _both_carriers():
        engine = make_engine(make_model(), _config(gather, reduce))
        for tokens in make_batches(3, world)[:, rank]:
            train_step(engine, tokens)
        name = engine.collectives_name
        engine.destroy()
    return name


@needs_a_gpu_each
@pytest.mark.parametrize("gather, reduce", [*SPLIT, ("peer", "peer"), *also(("nccl", "nccl"), ("auto", "nccl"))])
def test_an_engine_says_what_carries(gather, reduce):
    names = {found if found != "auto" else "peer": None for found in (gather, reduce)}
    assert run_ranks(3, _trained, gather, reduce) == ["/".join(names)] * 3


# --- the choice ---


def _probed():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    runtime.choices.addHandler(handler)
    runtime.choices.setLevel(logging.INFO)
    strata.init_distributed()
    if ON_GPU:  # the script has used NCCL
        torch.cuda.set_device(test_device())
        torch.distributed.all_reduce(torch.zeros(1, device=test_device()))
    with _both_carriers():
        engine = make_engine(make_model(), _config("auto", "auto", collectives="auto"))
    name, probe = (engine.init_report["collectives"][key] for key in ("name", "probe"))
    engine.destroy()
    return name, probe, said


@needs_a_gpu_each
def test_a_probe_compares_them_where_nccl_runs():
    told = run_ranks(2, _probed)
    assert told[0][:2] == told[1][:2]
    name, probe, said = told[0]
    assert set(name.split("/")) <= {"peer", "nccl"}
    assert set(probe) == {"peer", "nccl"}
    assert all(each["gather_s"] > 0 and each["reduce_s"] > 0 for each in probe.values())
    assert len(said) == 1 and "gathers go over" in said[0] and "nccl" in said[0]
    assert told[1][2] == []


def _nccl_does_not_start():
    def no_nccl(*_, **timeout):
        raise strata.CommError("no communicator to give")

    with _both_carriers(), mock.patch.object(runtime, "_new_backend", no_nccl):
        return error_of(lambda: make_engine(make_model(), _config("peer", "nccl", collectives="auto")))


def test_the_failure_of_a_process_group_is_told():
    assert_told(run_ranks(2, _nccl_does_not_start), "CommError", "no communicator to give")


def _unprobed():
    with _both_carriers(nccl_runs=False):
        engine = make_engine(make_model(), _config("auto", "auto", collectives="auto"))
    name, probe = (engine.init_report["collectives"][key] for key in ("name", "probe"))
    engine.destroy()
    return name, probe


def test_nccl_is_not_started_for_a_probe():
    assert run_ranks(2, _unprobed) == [("peer", None)] * 2


# --- settings that cannot be ---


def _errors():
    rank, _ = rank_and_world()
    cuda = {"strata": {"gather": "nccl"}, "zero_optimization": {"mics_shard_size": 1}}
    differing = _config("auto", "auto", collectives="shm" if rank else "c10d")
    with mock.patch.object(runtime, "_new_backend", side_effect=AssertionError("the ranks must not meet")):
        told = {"differing": error_of(strata.initialize, model=make_model(), config=differing)}
    told["choice"] = error_of(make_engine, make_model(), _config("shm", "auto"))
    if ON_GPU:
        told["groups"] = error_of(make_engine, make_model(), config_of(3, **cuda))
    else:
        told["host"] = error_of(make_engine, make_model(), _config("auto", "nccl", collectives="auto"))
    return told


def test_settings_that_cannot_be_are_refused():
    told = run_ranks(2, _errors)

    def of(name):
        return [by_rank[name] for by_rank in told]

    assert_told(of("differing"), "ConfigError", "strata.collectives, strata.gather and strata.reduce", "c10d", "shm",
                "rank 1")
    assert_told(of("choice"), "ConfigError", "strata.gather", "peer", "nccl", "shm")
    if ON_GPU:
        assert_told(of("groups"), "ConfigError", "strata.gather", "groups of 1 among 2 ranks")
    else:
        assert_told(of("host"), "ConfigError", "strata.reduce", "'nccl' is for GPUs", "cpu")
