"""Hooks of modules whose parameters are in tiles are called as usual; those of the parameters are refused by name. And
engines that follow each other on a model in tiles."""

import logging

import pytest
import strata
import torch
from devices import test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from tiled_models import batches_of, loss_of, make_tiled, tiled_config
from tiny_models import full_parameters, make_engine, rank_and_world, train_step
from torch import nn

from strata.model.tiles import tiles_of

MODULES = ("embedding", "up", "head")


def _hook(model, seen):
    """Hooks of every kind, which change inputs, outputs and gradients."""

    def note(kind, name, value):
        seen.append((kind, name, None if value is None else value.detach().cpu().clone()))

    for name in MODULES:
        module = model.get_submodule(name)

        def before(_, args, name=name):
            note("before", name, args[0])
            return (args[0] * 1.5,) if args[0].is_floating_point() else None

        def after(_, args, output, name=name):
            note("after", name, output)
            return output * 0.5

        def backward(_, inputs, outputs, name=name):
            note("input", name, inputs[0])
            note("output", name, outputs[0])
            return (inputs[0] * 2.0,) if inputs[0] is not None else None

        def before_backward(_, outputs, name=name):
            note("before backward", name, outputs[0])
            return (outputs[0] * 0.75,)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_full_backward_hook(backward)
        module.register_full_backward_pre_hook(before_backward)


def _hooked(late):
    rank, world = rank_and_world()
    (batch,) = batches_of(1, world)
    plain, expected = make_tiled(), []
    _hook(plain, expected)
    loss_of(plain, batch[rank]).backward()
    model, seen = make_tiled(), []
    if not late:
        _hook(model, seen)
    engine = make_engine(model, tiled_config())
    if late:
        _hook(model, seen)
    assert all(tiles_of(model.get_submodule(name).weight) for name in MODULES)
    train_step(engine, batch[rank], loss_of)
    engine.destroy()
    return seen, expected


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_modules_see_and_change_what_goes_through(late):
    for seen, expected in run_ranks(2, _hooked, late):
        assert [entry[:2] for entry in seen] == [entry[:2] for entry in expected] and len(seen) == 5 * len(MODULES)
        for (kind, name, value), (_, _, wanted) in zip(seen, expected):
            if wanted is None:
                assert value is None, (kind, name)
            else:
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=2e-6, msg=lambda m: f"{kind} {name}: {m}")


def _refused():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = make_tiled()
        getattr(model.up.weight, register)(lambda _: None)
        with pytest.raises(strata.UsageError, match="'up.weight' is used in tiles.*would not be called.*hook the mod"):
            make_engine(model, tiled_config())
        assert tiles_of(model.embedding.weight) is None and model.up.weight.shape == (64, 16)
        engine = make_engine(model, tiled_config(match=["embedding.weight"]))
        with pytest.raises(strata.UsageError, match=f"'embedding.weight' is used in tiles.*{register}"):
            getattr(model.embedding.weight, register)(lambda _: None)
        engine.destroy()


def test_hooks_of_a_tiled_parameter_are_refused_by_name():
    run_ranks(2, _refused)


def _nobody_asked():
    from strata.tiles.cutting import Budget

    of_rank, Budget.of_rank = Budget.of_rank, classmethod(lambda cls, config, *_: cls(config, 3000))
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("strata").addHandler(handler)
    try:
        model, called = make_tiled(), []
        model.up.weight.register_post_accumulate_grad_hook(called.append)
        config = tiled_config()
        del config["strata"]
        engine = make_engine(model, config)
        assert tiles_of(model.up.weight) is None and len(tiles_of(model.down.weight)) == 2
        assert any("'up.weight' takes more than half" in text and "hooks" in text for text in said)
        engine.destroy()
    finally:
        Budget.of_rank = of_rank


def test_a_parameter_with_hooks_that_nobody_asked_to_cut_stays_whole():
    run_ranks(2, _nobody_asked)


def _one_after_the_other(tied):
    """Three engines, the second with other tiles and the third without, train as plain torch does in one go."""
    rank, world = rank_and_world()
    batches = batches_of(6, world)
    plain = PlainTrainer(make_tiled(tied=tied), world, lambda ps: torch.optim.SGD(ps, lr=0.1), torch.float32)
    expected = []
    for batch in batches:
        expected += plain.micro_step(list(batch), loss_of)[rank : rank + 1]
        plain.step()
    model, losses = make_tiled(tied=tied), []
    for turn, rows in enumerate((9, 5, 1000)):
        config = tiled_config(rows=rows)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        engine = make_engine(model, config)
        assert (tiles_of(model.up.weight) is None) == (rows == 1000)
        losses.append(train_step(engine, batches[2 * turn][rank], loss_of))
        if rows < 1000:
            with pytest.raises(strata.UsageError, match="'embedding.weight' is used in tiles by an engine that lives"):
                make_engine(model, config)
        losses.append(train_step(engine, batches[2 * turn + 1][rank], loss_of))  # the refused call changed nothing
        trained = full_parameters(model)
        engine.destroy(keep_values=True)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=2e-6)
    for name, value in plain.values().items():
        torch.testing.assert_close(trained[name].to(test_device()), value.to(test_device()), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_engines_one_after_the_other_go_on_with_a_model_in_tiles(world):
    for tied in (False, True):
        run_ranks(world, _one_after_the_other, tied)
