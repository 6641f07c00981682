"""An engine that is destroyed, or dropped, leaves nothing behind."""

import copy
import gc
import weakref

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
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

STAGES = range(4)


def _destroyed_and_made_again():
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    for stage in STAGES:
        model = make_model()
        engine = make_engine(model, config_of(stage, live_bytes=1))
        train_step(engine, tokens[0][rank])
        values = full_parameters(model)
        stays = stage < 3 or world == 1
        engine.destroy(keep_values=not stays)
        left = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert differences(left, values) == [], f"stage {stage}"
        assert all(type(p) is torch.nn.Parameter and not hasattr(p, "ds_id") for p in model.parameters())
        assert "forward" not in model.layers[0].__dict__ and "_strata_core" not in model.__dict__
        again = make_engine(model, config_of(3 - stage))
        restored = make_model()
        restored.load_state_dict(values)
        reference = PlainTrainer(restored, world, adamw)
        reference.micro_step(tokens[1], loss_of)
        reference.step()
        train_step(again, tokens[1][rank])
        assert differences(full_parameters(model), reference.values()) == [], f"stage {stage}"
        again.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_whole_stays_and_a_second_engine_goes_on(world):
    run_ranks(world, _destroyed_and_made_again)


def _parameters_of_a_dropped_engine():
    model = make_model()
    parameters = list(model.named_parameters())
    make_engine(model, config_of(3, live_bytes=1))
    return parameters


def _given_up():
    model = make_model()
    make_engine(model, config_of(3, live_bytes=1)).destroy()
    bare = torch.nn.Module()
    for name, parameter in _parameters_of_a_dropped_engine():
        bare.register_parameter(name.replace(".", "_"), parameter)
    gc.collect()
    told = []
    for given in (model, bare):
        with pytest.raises(strata.UsageError) as error:
            make_engine(given, config_of(2))
        told.append(str(error.value))
    for parameter, new in zip(model.parameters(), make_model().parameters()):
        parameter.data = new.data
    make_engine(model, config_of(3)).destroy()
    return told


def test_a_model_whose_values_went_with_its_engine_is_refused_until_it_has_new_ones():
    for told in run_ranks(2, _given_up):
        for message in told:
            assert "parameters of this model are empty" in message and "destroy(keep_values=True)" in message
            assert "First: 'one'" in message


def _dropped():
    rank, world = rank_and_world()
    for stage in STAGES:
        for optimizer in (True, False):
            engine = make_engine(make_model(), config_of(stage, live_bytes=1, optimizer=optimizer))
            if optimizer:
                train_step(engine, make_batches(1, world)[0][rank])
            core, module = weakref.ref(engine.core), weakref.ref(engine.module)
            engine.core.wait_for_all()  # no rank may read from a peer whose engine has ended
            del engine
            gc.collect()
            assert core() is None and module() is None, f"stage {stage}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_engine_that_nobody_refers_to_is_freed(world):
    run_ranks(world, _dropped)


def _model_is_kept():
    model = make_model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    core = weakref.ref(make_engine(model, config_of(3, live_bytes=1)).core)
    gc.collect()
    assert core() is not None and differences(full_parameters(model), values) == []
    with strata.zero.GatheredParameters(list(model.parameters())):
        twin = copy.deepcopy(model)
    assert twin.__dict__["_strata_core"] is None
    engine = make_engine(model, config_of(1))
    gc.collect()
    assert core() is None and differences(full_parameters(model), values) == []
    engine.destroy()


def test_a_model_that_is_kept_keeps_its_values_until_another_engine_takes_them():
    run_ranks(2, _model_is_kept)
