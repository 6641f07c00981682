"""Bad input: the message, on every rank, within seconds; and the calls that still work afterwards."""

import os
import signal
import time

import pytest
import strata
import torch
from comparison import adamw
from devices import ON_GPU, test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import each_once
from tiny_models import (
    TinyModel,
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
from torch import nn

WORLD = 2
SECONDS = 30.0  # for all of a test, on a busy machine; a hang would last strata.timeout_s


def error_of(call, *args, **kwargs):
    """("Class: message"), and AssertionError if nothing was raised."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def step_to_its_end(engine):
    """A step that has said all that it has to say: on a GPU the next one would say it."""
    engine.step()
    engine.core.finish_step()


def assert_told(messages, *words):
    for rank, message in enumerate(messages):
        for word in words:
            assert word in message, f"rank {rank} was told: {message}"


# --- configurations ---

CONFIGURATIONS = {
    "contradictory batch sizes": (
        {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
        ["ConfigError", "train_batch_size", "7 != 4 x 1 x 2"]),
    "batch sizes that do not divide": (
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, ["ConfigError", "train_batch_size", "9"]),
    "no batch size": ({}, ["ConfigError", "train_batch_size"]),
    "unsupported feature": ({"train_batch_size": 8, "amp": {"enabled": True}}, ["ConfigError", "amp", "bf16"]),
    "wrong type": ({"train_batch_size": 8, "gradient_clipping": "much"},
                   ["ConfigError", "gradient_clipping", "number", "much"]),
    "wrong type within": ({"train_batch_size": 8, "zero_optimization": {"stage": "three"}},
                          ["ConfigError", "zero_optimization.stage", "three"]),
    "no such stage": ({"train_batch_size": 8, "zero_optimization": {"stage": 4}},
                      ["ConfigError", "zero_optimization.stage", "4"]),
    "unknown key": ({"train_batch_size": 8, "gradient_cliping": 1.0},
                    ["ConfigError", "gradient_cliping", "gradient_clipping"]),
    "two precisions": ({"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
                       ["ConfigError", "bf16", "fp16"]),
    "unknown optimizer": ({"train_batch_size": 8, "optimizer": {"type": "Adamm"}}, ["ConfigError", "Adamm"]),
    "GPUs' collectives on the host": ({"train_batch_size": 8, "strata": {"device": "cpu", "collectives": "nccl"}},
                                      ["ConfigError", "strata.collectives", "'nccl' joins GPUs", "cpu"]),
    "not a configuration": (17, ["ConfigError", "dict, a path or JSON text", "int"]),
    "no such file": ("/nowhere/config.json", ["/nowhere/config.json"]),
    "broken JSON": ('{"train_batch_size": 8,', ["ConfigError", "JSON"]),
}


if not ON_GPU:
    CONFIGURATIONS["a GPU where there is none"] = (
        {"train_batch_size": 8, "strata": {"device": "cuda"}}, ["ConfigError", "strata.device", "torch sees 0 GPUs"])


def _configurations():
    return {name: error_of(strata.initialize, model=make_model(), config=config)
            for name, (config, _) in CONFIGURATIONS.items()}


def test_configurations_that_are_wrong():
    told = run_ranks(WORLD, _configurations, timeout=SECONDS)
    for name, (_, words) in CONFIGURATIONS.items():
        assert_told([by_rank[name] for by_rank in told], *words)


# --- ranks that differ ---


def _model_of(kind, rank):
    model = make_model(blocks=4) if kind == "more blocks" and rank == 1 else make_model()
    if rank == 1:
        if kind == "another shape":
            model.head = nn.Linear(16, 12, device=test_device())
        elif kind == "frozen":
            model.layers[1].up.weight.requires_grad_(False)
        elif kind == "another dtype":
            model.layers[1].up.to(torch.bfloat16)
        elif kind == "another name":
            model.tail = model.head
            del model.head
    return model


def _without_values():
    with torch.device("meta"):
        model = TinyModel()
    return error_of(strata.initialize, model=model, config=config_of(3))


def test_a_model_without_values_is_refused():
    told = run_ranks(WORLD, _without_values, timeout=SECONDS)
    assert_told(told, "ConfigError", "load_pretrained", "found 'none'")


def _different(kind):
    rank, _ = rank_and_world()
    config = config_of(2 if kind == "another stage" and rank else 3,
                       "bf16" if kind == "another precision" and rank else "fp32",
                       clipping=1.0 if kind == "another clipping" and rank else 0.0)
    if kind == "one refuses" and rank:
        config["amp"] = {"enabled": True}
    return error_of(make_engine, _model_of(kind, rank), config)


DIFFERENT = {
    "more blocks": ["different models", "rank 1", "layers.3"],
    "another shape": ["different models", "rank 1", "head.weight", "12"],
    "frozen": ["different models", "rank 1", "layers.1.up.weight"],
    "another dtype": ["different models", "rank 1", "layers.1.up.weight", "bfloat16"],
    "another name": ["different models", "rank 1", "tail.weight"],
    "another stage": ["different configurations", "rank 1", "stage"],
    "another precision": ["different configurations", "rank 1"],
    "another clipping": ["different configurations", "rank 1", "clipping"],
    "one refuses": ["amp"],
}


@pytest.mark.parametrize("kind", sorted(DIFFERENT))
def test_ranks_that_differ(kind):
    assert_told(run_ranks(WORLD, _different, kind, timeout=SECONDS), *DIFFERENT[kind])


# --- numbers ---


def _nan_loss(dtype, stage):
    rank, _ = rank_and_world()
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    reference = PlainTrainer(make_model(), WORLD, adamw, dtypes[dtype])
    engine = make_engine(make_model(), config_of(stage, dtype, strata={"max_skipped_steps": 0}))
    messages = []
    for step, tokens in enumerate(make_batches(4, WORLD)):
        if step in (1, 2):
            before = full_parameters(engine.module)
            loss = loss_of(engine, tokens[rank])
            engine.backward(loss * float("nan") if rank == 1 or step == 2 else loss)
            messages.append(error_of(step_to_its_end, engine))
            assert differences(full_parameters(engine.module), before) == []
        else:
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
    assert differences(full_parameters(engine.module), reference.values()) == []
    return messages


@each_once({"stage": [0, 3], "dtype": ["fp32", "bf16"]})
def test_a_nan_loss_leaves_the_weights_and_training_goes_on(dtype, stage):
    for messages in run_ranks(WORLD, _nan_loss, dtype, stage, timeout=SECONDS):
        assert_told(messages, "NumericsError", "not finite", "unchanged", "rank", "unit")


# --- calls out of order ---


def _calls(stage):
    rank, _ = rank_and_world()
    tokens = make_batches(2, WORLD)[:, rank]
    engine = make_engine(make_model(), config_of(stage))
    told = {
        "step": error_of(engine.step),
        "backward": error_of(engine.backward, torch.zeros((), requires_grad=True)),
    }
    train_step(engine, tokens[0])
    told["second step"] = error_of(engine.step)
    told["second backward"] = error_of(engine.backward, torch.zeros((), requires_grad=True))
    train_step(engine, tokens[1])  # none of this did harm
    told["not scalar"] = error_of(engine.backward, engine(tokens[0]))
    told["another engine's optimizer"] = error_of(
        strata.initialize, model=make_model(), config=config_of(stage, optimizer=False), optimizer=engine.optimizer)
    engine.destroy()
    told["forward after destroy"] = error_of(engine, tokens[0])
    told["backward after destroy"] = error_of(engine.backward, torch.zeros((), requires_grad=True))
    told["step after destroy"] = error_of(engine.step)
    evaluating = make_engine(make_model(), config_of(stage, optimizer=False))
    told["evaluation only"] = error_of(train_step, evaluating, tokens[0])
    model = make_model()
    told["left out"] = error_of(strata.initialize, model=model, config=config_of(stage),
                                model_parameters=list(make_model().parameters()))
    told["no model"] = error_of(strata.initialize, config=config_of(stage))
    return told


CALLS = {
    "step": ["MissingBackward", "without a backward"],
    "backward": ["UsageError", "no forward"],
    "second step": ["MissingBackward", "without a backward"],
    "second backward": ["UsageError", "no forward"],
    "not scalar": ["scalar"],
    "another engine's optimizer": ["UsageError", "belongs to another engine"],
    "forward after destroy": ["UsageError", "destroyed"],
    "backward after destroy": ["UsageError", "destroyed"],
    "step after destroy": ["UsageError", "destroyed"],
    "evaluation only": ["UsageError", "without an optimizer"],
    "left out": ["UsageError", "no trainable parameter", "from this model's parameters"],
    "no model": ["UsageError", "model="],
}


@pytest.mark.parametrize("stage", [1, 3])
def test_calls_out_of_order(stage):
    told = run_ranks(WORLD, _calls, stage, timeout=SECONDS)
    for name, words in CALLS.items():
        assert_told([by_rank[name] for by_rank in told], *words)


# --- a rank that dies ---


def train_until_one_dies(config, victim):
    """(message on a surviving rank, seconds until it): ``victim`` kills itself in the third step."""
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config)
    started = None
    try:
        for step, tokens in enumerate(make_batches(200, world)):
            if step == 2 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 2:
                started = time.monotonic()
            train_step(engine, tokens[rank])
    except strata.CommError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("no error was raised")


def _dies(stage):
    return train_until_one_dies(config_of(stage, live_bytes=1), 1)


@each_once({"stage": [0, 3], "world": [2, 3]})
def test_a_rank_that_dies_is_named_to_the_others(world, stage):
    answers = run_ranks(world, _dies, stage, timeout=SECONDS, may_die=[1])
    assert answers[1] is None
    for rank in range(world):
        if rank != 1:
            assert "rank 1" in answers[rank][0] and answers[rank][1] < 15.0
