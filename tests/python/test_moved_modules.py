"""A script moves modules to the device on which they are, or converts them to the dtype that they have, at any time.
torch then copies parameters ("cpu:0" is another device than "cpu" to it), and training goes on to the same bits."""

import itertools

import pytest
import torch
from comparison import adamw
from devices import test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.zero import Init
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
)

PLACE = torch.device(test_device().type, 0)
WAYS = {
    "a name with an index": lambda module, _: module.to(str(PLACE)),
    "a device and a dtype": lambda module, dtype: module.to(device=PLACE, dtype=dtype),
    "another tensor": lambda module, dtype: module.to(torch.ones(1, device=PLACE, dtype=dtype)),
    "type": lambda module, dtype: module.type(dtype),
    "a copy": lambda module, _: module._apply(lambda tensor: tensor.clone()),
    "a part": lambda module, _: next(module.children()).to(PLACE),
    "the host": lambda module, _: module.cpu(),
    "shared memory": lambda module, _: module.share_memory(),
    "nothing": lambda module, dtype: module.to(PLACE.type).to(dtype),
}


def _train(stage, dtype, born):
    rank, world = rank_and_world()
    config = config_of(stage, dtype, live_bytes=1)
    with Init(config_dict_or_path=config, enabled=born):
        model = make_model()
    ways = itertools.cycle(WAYS.items())
    said = []

    def move(where):
        name, way = next(ways)
        said.append(f"{name} {where}")
        way(model, DTYPES[dtype])

    plain = make_model()
    plain.load_state_dict({name: value.float() for name, value in full_parameters(model).items()})
    reference = PlainTrainer(plain, world, adamw, DTYPES[dtype])
    if born:  # before, a model is the script's own
        for _ in WAYS:
            move("before the engine")
    engine = make_engine(model, config)
    for tokens in make_batches(3, world):
        move("before forward")
        loss = loss_of(engine, tokens[rank])
        move("before backward")
        engine.backward(loss)
        if stage < 3 or world == 1:  # elsewhere gradients are in shards, and an error tells code that copies them
            move("before the step")
        engine.step()
        move("after the step")
        reference.micro_step(tokens, loss_of)
        reference.step()
        wrong = differences(full_parameters(model), reference.values())
        assert wrong == [], f"stage {stage}, {dtype}, born {born}, after {said}: {wrong}"
    engine.destroy()


def _everywhere():
    for stage, born in ((0, False), (2, True), (3, False), (3, True)):
        for dtype in ("fp32", "bf16"):
            _train(stage, dtype, born)


@pytest.mark.parametrize("world", [1, 2])
def test_a_module_moved_to_where_it_is_trains_on(world):
    run_ranks(world, _everywhere)
