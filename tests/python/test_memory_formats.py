"""Convolutions whose weights are channels_last at `initialize`: the engine lays them out contiguous and says so, their
kernels stay those of the input's format, and values are the same bits as in plain torch with channels_last."""

import logging
from contextlib import contextmanager

import pytest
import torch
from comparison import adamw
from devices import test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from test_assigned_data import _errors_into
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, make_engine, make_model, rank_and_world, train_step,
)
from torch import nn

STEPS = 3
LABELS = 5


class Convolutions(nn.Module):
    """Over images, then over volumes."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3, padding=1)
        self.strided = nn.Conv2d(8, 8, 3, stride=2)
        self.volume = nn.Conv3d(4, 6, (1, 3, 3))
        self.head = nn.Linear(6, LABELS)
        self.formats = []

    def forward(self, images):
        hidden = self.strided(torch.relu(self.image(images.to(self.head.weight.dtype))))
        cubes = hidden.unflatten(1, (4, 2)).contiguous(memory_format=torch.channels_last_3d)
        output = self.volume(cubes)
        self.formats.append(hidden.is_contiguous(memory_format=torch.channels_last)
                            and output.is_contiguous(memory_format=torch.channels_last_3d))
        return self.head(output.mean((2, 3, 4)))


def _loss_of(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def _make(channels_last):
    model = make_model(Convolutions)
    if channels_last:
        for module in (model.image, model.strided):
            module.to(memory_format=torch.channels_last)
        model.volume.to(memory_format=torch.channels_last_3d)
        assert not any(m.weight.is_contiguous() for m in (model.image, model.strided, model.volume))
    return model


def _make_batches(world):
    """[step][rank]: images in channels_last, and labels."""
    generator = torch.Generator().manual_seed(3)
    shape = (STEPS, world, 4, 3, 11, 11)
    images = torch.randn(shape, generator=generator).to(test_device())
    labels = torch.randint(0, LABELS, shape[:3], generator=generator).to(test_device())
    return [[(image.contiguous(memory_format=torch.channels_last), label) for image, label in zip(*of_step)]
            for of_step in zip(images, labels)]


@contextmanager
def _warnings():
    """A list of what the logger warns of."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("strata")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _told(said):
    return [line for line in said if "permuted strides" in line]


def _trains(folder):
    rank, world = rank_and_world()
    batches = _make_batches(world)
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            where = f"stage {stage}, {dtype}"
            config = config_of(stage, dtype, live_bytes=1)
            with _warnings() as said:
                engine = make_engine(_make(True), config)
            assert len(_told(said)) == (1 if rank == 0 else 0), said
            reference = PlainTrainer(_make(True), world, adamw, DTYPES[dtype])
            assert not reference.model.volume.weight.is_contiguous(), "the reference has lost the format itself"
            for batch in batches:
                train_step(engine, batch[rank], _loss_of)
                reference.micro_step(batch, _loss_of)
                reference.step()
            wrong = differences(full_parameters(engine.module), reference.values())
            assert wrong == [], f"{where}: {wrong}"
            assert engine.module.formats == [True] * STEPS, where
            _exchange_checkpoints(engine, config, str(folder / f"{stage}{dtype}"), batches[0][rank])


def _exchange_checkpoints(first, config, folder, batch):
    """From a model in channels_last to a contiguous one and back; ends the engines."""
    first.save_checkpoint(f"{folder}-from-channels-last")
    train_step(first, batch, _loss_of)
    wanted = full_parameters(first.module)
    first.destroy()
    with _warnings() as said:
        second = make_engine(_make(False), config)
    assert _told(said) == []
    second.load_checkpoint(f"{folder}-from-channels-last")
    second.save_checkpoint(f"{folder}-from-contiguous")
    third = make_engine(_make(True), config)
    third.load_checkpoint(f"{folder}-from-contiguous")
    for engine in (second, third):
        train_step(engine, batch, _loss_of)
        assert differences(full_parameters(engine.module), wanted) == []
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_convolutions_in_channels_last_train_as_in_torch_and_exchange_checkpoints(world, tmp_path):
    run_ranks(world, _trains, tmp_path)


def test_the_warning_names_the_parameter_its_format_and_the_remedy():
    with _warnings() as said:
        make_engine(_make(True), config_of(2, "bf16")).destroy()
    [text] = _told(said)
    for part in ("'image.weight' has permuted strides (27, 1, 9, 3)", "as do 2 other parameters",
                 "channels_last kernels", "x.to(memory_format=torch.channels_last)", "copies"):
        assert part in text, text
    with _warnings() as said:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(test_device())
        model[1].weight = nn.Parameter(torch.ones(4, 2, device=test_device()).t())
        make_engine(model, config_of(1)).destroy()
    [text] = _told(said)
    assert "'1.weight' has permuted strides (1, 2); the engine keeps" in text and "Convolution" not in text, text


def _converts_late(folder):
    rank, world = rank_and_world()
    engine = make_engine(_make(False), config_of(1))
    batches = _make_batches(world)
    reference = PlainTrainer(_make(True), world, adamw)
    told = folder / str(rank)
    with _errors_into(told):
        for batch in batches:
            engine.module.image.to(memory_format=torch.channels_last)
            train_step(engine, batch[rank], _loss_of)
            reference.micro_step(batch, _loss_of)
            reference.step()
    assert differences(full_parameters(engine.module), reference.values()) == []
    assert engine.module.image.weight.is_contiguous()
    text = told.read_text()
    assert text.count("'image.weight' was converted") == (1 if rank == 0 else 0), text
    assert rank > 0 or "it stays contiguous" in text, text
    engine.destroy()


def test_a_format_that_is_set_after_initialize_is_undone_and_told_once(tmp_path):
    run_ranks(2, _converts_late, tmp_path)
