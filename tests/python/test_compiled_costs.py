"""Choices that cost memory or graphs beside torch.compile: stage3_allgather_sequential and autocast. A module that is
compiled before initialize is gathered as one; warnings say the rest, once."""

import copy
import gc
import logging
import weakref

import torch
from compiled_training import Graphs, compile_blocks, train
from ranks import run_ranks
from tiny_models import config_of, differences, loss_of, make_batches, make_engine, make_model, rank_and_world
from torch import nn

ONE_BY_ONE = {"stage": 3, "stage3_allgather_sequential": True}


class _Warnings(logging.Handler):
    """The warnings of Strata in a context."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("strata").addHandler(self)
        return self.said

    def __exit__(self, *_):
        logging.getLogger("strata").removeHandler(self)


def _one_by_one():
    rank, _ = rank_and_world()
    config = config_of(3, live_bytes=1, zero_optimization=ONE_BY_ONE)
    losses, weights, _ = train(make_model, config)
    backend = Graphs()
    with _Warnings() as said:
        compiled, compiled_weights, breaks = train(make_model, config, backend)
    assert said == [] and backend.made == 1 and breaks == {}
    assert compiled == losses and differences(compiled_weights, weights) == []
    with _Warnings() as said:
        compiled, _, breaks = train(make_model, config, Graphs("eager"), recompiles=True,
                                    after=lambda engine, backend: compile_blocks(engine.module, backend, False))
    assert compiled == losses and breaks
    assert len(said) == (rank == 0) and all("'layers.0' was compiled after initialize" in text for text in said), said


def test_a_block_that_is_compiled_before_initialize_is_gathered_as_one():
    run_ranks(2, _one_by_one, timeout=240.0)


class _Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = make_model().layers, nn.LayerNorm(16)


class _WithDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = _Decoder()


def test_a_compiled_module_of_many_blocks_is_not_gathered_as_one():
    for more in ({}, ONE_BY_ONE):
        units = []
        for compiled in (False, True):
            model = _WithDecoder()
            if compiled:
                model.decoder.compile()
            engine = make_engine(model, config_of(3, zero_optimization=more))
            units.append((engine.core.units(), engine.core.scopes()))
            engine.destroy()
        assert units[0] == units[1]


def test_the_first_forward_is_checked_once_with_an_engine_or_without():
    tokens = make_batches(1, 1)[0][0]
    model = make_model()
    hooks = len(model._forward_pre_hooks)
    engine = make_engine(model, config_of(2, strata={"move_inputs": False}))
    copied = copy.deepcopy(model)
    engine = weakref.ref(engine)
    gc.collect()
    assert engine() is None
    for module in (model, copied):
        assert len(module._forward_pre_hooks) == hooks + 1
        loss_of(module, tokens)
        assert len(module._forward_pre_hooks) == hooks


def _under_autocast():
    rank, world = rank_and_world()
    tokens = make_batches(1, world)[0][rank]
    section = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    for stage, dtype, more, around, expected in (
        (3, "fp32", {}, True, True), (3, "fp32", section, False, True), (2, "fp32", section, True, False),
        (3, "bf16", {}, True, False), (3, "fp32", {}, False, False),
    ):  # fmt: skip
        with _Warnings() as said:
            engine = make_engine(make_model(), config_of(stage, dtype, **more))
            for _ in range(2):
                with torch.autocast(tokens.device.type, torch.bfloat16, enabled=around):
                    loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
            engine.destroy()
        wanted = int(expected and rank == 0)
        assert len(said) == wanted and all("bf16.enabled" in text for text in said), (stage, dtype, more, said)


def test_weights_that_autocast_keeps_are_said_once():
    run_ranks(2, _under_autocast)
