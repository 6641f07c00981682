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
from test_errors import assert_told, error_of
from tiny_models import config_of, make_batches, make_engine, make_model, rank_and_world, train_step

import strata
from strata.ranks import carriers, runtime

SPLIT = [("peer", "nccl"), ("nccl", "peer")]


@contextmanager
def _both_carriers(wanted=None):
    """``wanted``: instead of what the configuration makes of the device."""
    if ON_GPU:
        yield
        return

    def gloo(part, device, timeout_s):
        return part.new_group("gloo", timeout_s)._get_backend(torch.device("cpu"))

    with mock.patch.object(carriers, "nccl_backend", gloo), \
         mock.patch.object(runtime, "require_sensible", lambda *_: None), \
         mock.patch.object(runtime, "nccl_runs", lambda _: True), \
         mock.patch.object(runtime, "wanted_carriers",
                           lambda *found: wanted or carriers.wanted_carriers(*found)):
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
    """Of two terms there is one sum, in any order."""
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
@pytest.mark.parametrize("gather, reduce", [*SPLIT, ("peer", "peer"), ("nccl", "nccl"), ("auto", "nccl")])
def test_an_engine_says_what_carries(gather, reduce):
    names = {found if found != "auto" else "peer": None for found in (gather, reduce)}
    assert run_ranks(3, _trained, gather, reduce) == ["/".join(names)] * 3


# --- the choice ---


def test_nccl_must_be_faster_by_far():
    figures = {"peer": (3.0, 3.0), "nccl": (2.5, 1.9)}
    assert carriers.choose(("auto", "auto"), figures) == ("peer", "nccl")
    assert carriers.choose(("nccl", "auto"), figures) == ("nccl", "nccl")
    assert carriers.choose(("auto", "peer"), figures) == ("peer", "peer")


def test_what_could_not_be_measured_is_not_chosen():
    never = float("inf")
    for peer, nccl in (((never, never), (1.0, 1.0)), ((1.0, 1.0), (never, never)), ((never, never), (never, never))):
        assert carriers.choose(("auto", "auto"), {"peer": peer, "nccl": nccl}) == ("peer", "peer")


def _probed():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("strata.ranks.carriers")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    strata.init_distributed()
    if ON_GPU:  # the script has used NCCL
        torch.cuda.set_device(test_device())
        torch.distributed.all_reduce(torch.zeros(1, device=test_device()))
    with _both_carriers(("auto", "auto")):
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


def _neither_starts():
    def no_peers(*_):
        raise strata.CommError("rank 1 cannot share memory with the others: no handles to give")

    def no_nccl(*_):
        raise strata.CommError("rank 0 on host h: NCCL did not start on cuda:0")

    with mock.patch.object(runtime, "wanted_carriers", lambda *_: ("auto", "auto")), \
         mock.patch.object(carriers._C, "peer_collectives", no_peers), \
         mock.patch.object(carriers, "nccl_backend", no_nccl):
        return error_of(lambda: make_engine(make_model(), _config("auto", "auto", collectives="auto")))


def test_the_failure_of_nccl_says_why_peers_were_not_taken():
    told = run_ranks(2, _neither_starts)
    assert_told(told, "CommError", "NCCL did not start", "do not reach each other's memory", "no handles to give")


def _unprobed():
    with mock.patch.object(runtime, "wanted_carriers", lambda *_: ("auto", "auto")):
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
    with mock.patch.object(runtime, "_join", side_effect=AssertionError("the ranks must not meet")):
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


class _Asked:
    def __init__(self, gather, reduce):
        self.gather, self.reduce = gather, reduce


def test_groups_are_for_one_choice():
    with pytest.raises(strata.ConfigError, match="strata.reduce: for ranks that are one shard group.*groups of 2 among 4"):
        carriers.require_sensible(_Asked("auto", "peer"), 4, 2, torch.device("cuda", 0))


def test_carriers_follow_the_collectives_unless_they_are_named():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    auto = _Asked("auto", "auto")
    assert carriers.wanted_carriers(auto, "auto", True, gpu) == ("auto", "auto")
    assert carriers.wanted_carriers(auto, "auto", False, gpu) == ("nccl", "nccl")
    assert carriers.wanted_carriers(auto, "c10d", True, gpu) == ("nccl", "nccl")
    assert carriers.wanted_carriers(auto, "peer", True, cpu) == ("peer", "peer")
    assert carriers.wanted_carriers(auto, "auto", True, cpu) is None
    assert carriers.wanted_carriers(_Asked("nccl", "auto"), "peer", True, gpu) == ("nccl", "peer")
    assert carriers.wanted_carriers(_Asked("auto", "peer"), "nccl", True, gpu) == ("nccl", "peer")
