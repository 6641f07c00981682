"""A GPU of which another process holds most: every rank takes the way into the engine that all have room for."""

import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
import strata
import torch
from devices import ON_GPU, needs_a_gpu_each, test_device
from ranks import run_ranks
from tiny_models import config_of, make_engine, rank_and_world

pytestmark = [needs_a_gpu_each, pytest.mark.skipif(not ON_GPU, reason="ranks on the host share what is free there")]

WIDTH = 8192
CROWDED = 1  # the rank whose GPU is shared

# A process that takes memory until the given number of bytes is free, says so, and holds it until its input ends.
NEIGHBOUR = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
held = torch.empty(max(0, torch.cuda.mem_get_info()[0] - int(sys.argv[2])), dtype=torch.uint8, device="cuda")
print("holds", held.numel(), flush=True)
sys.stdin.read()
"""


@contextmanager
def _neighbour(leaves):
    arguments = [sys.executable, "-c", NEIGHBOUR, str(test_device().index), str(leaves)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("holds")
        yield
    finally:
        process.stdin.close()
        process.wait()


def _model():
    """fp32 on the GPU; a forty-seventh of its bytes are as many elements. (model, elements)."""
    layers = torch.cuda.get_device_properties(test_device()).total_memory // 47 // WIDTH**2
    torch.manual_seed(3)
    with test_device():
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, layers * WIDTH**2


def _samples(model, dtype):
    return [p.detach()[:64].to("cpu", dtype) for p in model.parameters()]


def _start(left):
    """At stage 1 two ranks' engines take 7 bytes an element: weights 2, remainders of masters 1, AdamW's states 4."""
    torch.cuda.set_device(test_device())
    model, elements = _model()
    before = _samples(model, torch.float32)
    crowded = rank_and_world()[0] == CROWDED
    with _neighbour(left * elements) if crowded else nullcontext():
        try:
            engine = make_engine(model, config_of(1, "bf16", strata={"wrap": ["Linear"]}))
        except strata.Error as error:
            return "refused", str(error), _same(before, _samples(model, torch.float32))
        rounded = [value.bfloat16() for value in before]
        told = engine.init_report["tier"], engine.init_report["reason"]
        same = _same(rounded, _samples(model, torch.bfloat16))
        engine.destroy()
    return *told, same


def _same(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def test_ranks_with_room_copy():
    for tier, reason, same in run_ranks(2, _start, 16, alone=True):
        assert (tier, same) == ("device_copy", True), reason


def test_all_ranks_grow_where_one_has_too_little_room_to_copy():
    for tier, reason, same in run_ranks(2, _start, 6, alone=True):
        assert (tier, same) == ("device_grow", True), reason
        assert "device_copy lacks" in reason and "least is free on rank 1" in reason


def test_all_ranks_refuse_what_one_has_no_room_for_and_keep_their_models():
    for tier, reason, same in run_ranks(2, _start, 1, alone=True):
        assert (tier, same) == ("refused", True), reason
        assert "the model does not fit: rank 1 lacks" in reason and "Nothing has been moved" in reason
