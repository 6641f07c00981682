"""A thread that reads weights, for logging or moving averages, beside the one that trains."""

import threading

import pytest
import torch
from ranks import run_ranks
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)

WORLD = 2
SECONDS = 60.0
STEPS = 6


class Reader(threading.Thread):
    """Reads all parameters of a model again and again, until it is told to stop."""

    def __init__(self, model):
        super().__init__(daemon=True)
        self._parameters = list(model.parameters())
        self._ending = threading.Event()
        self.began = threading.Event()  # it has read a parameter
        self.read_once = threading.Event()  # it has read all
        self.error = None

    def run(self):
        try:
            while not self._ending.is_set():
                for parameter in self._parameters:
                    assert torch.isfinite(parameter.detach().clone()).all()
                    assert parameter.data.sum().isfinite()
                    self.began.set()
                self.read_once.set()
        except BaseException as error:
            self.error = error
            self.began.set()
            self.read_once.set()

    def stop(self):
        self._ending.set()
        self.join(SECONDS)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


def _awaited(parameter):
    return "DeferredInit" in str(torch._C._dispatch_keys(parameter))


def _trained(stage, reads):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(stage, "bf16", strata={"refresh_at": "forward"}))
    batches = make_batches(STEPS, world)
    reader = Reader(engine.module)
    train_step(engine, batches[0][rank])
    assert all(_awaited(p) for p in engine.module.parameters())
    if reads:
        reader.start()
        assert reader.began.wait(SECONDS)  # it completes the others beside the forward that needs them
    for tokens in batches[1:]:
        loss = loss_of(engine, tokens[rank])
        engine.backward(loss)
        if reads:
            assert reader.read_once.wait(SECONDS)
        engine.step()
        # Tensors are not turned to other memory while another thread reads them.
        assert any(_awaited(p) for p in engine.module.parameters()) != reads
    if reads:
        reader.stop()
    values = full_parameters(engine.module)
    engine.destroy()
    return values


def _reading_changes_nothing(stage):
    assert not differences(_trained(stage, reads=False), _trained(stage, reads=True))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_thread_that_reads_awaited_weights_changes_no_bit(stage):
    run_ranks(WORLD, _reading_changes_nothing, stage, timeout=4 * SECONDS)


def _in_a_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


def _sharded():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3, live_bytes=1))
    told = []

    def read():
        try:
            told.append(tuple(engine.module.layers[2].up.weight.detach().clone().shape))
        except RuntimeError as error:
            told.append(str(error))

    batches = make_batches(2, world)
    hook = engine.module.layers[0].norm.register_forward_hook(lambda *_: _in_a_thread(read))
    train_step(engine, batches[0][rank])
    assert "in a thread of its own while another thread runs forward" in told[0], told
    assert "layers.2" in told[0], told
    hook.remove()
    _in_a_thread(read)
    assert told[1] == (32, 16), told
    train_step(engine, batches[1][rank])  # and training goes on
    engine.destroy()


def test_a_sharded_weight_is_gathered_for_another_thread_between_passes_alone():
    run_ranks(WORLD, _sharded, timeout=4 * SECONDS)
