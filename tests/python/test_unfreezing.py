"""A parameter that is frozen at ``initialize`` and unfrozen later trains from then on, as in plain torch."""

import pytest
import strata
import torch
from comparison import NORM_TOLERANCE
from devices import shares_a_gpu
from plain_torch import PlainTrainer
from ranks import run_ranks
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
    train_step,
)

FROZEN = ("embedding", "layers.0", "layers.2")
# By step: the parameters that are unfrozen, or frozen (again), before it.
CHANGES = {2: (("layers.0.up",), True), 3: (("layers.0", "embedding"), True), 5: (("layers.1", "layers.0.up"), False),
           6: (("layers.0", "layers.1", "layers.2"), True)}  # fmt: skip
STEPS = 8


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False)


def _adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.05, foreach=False)


def _set(model, prefixes, requires_grad):
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(requires_grad)


def _make_model():
    """Frozen values that bf16 holds, since a frozen parameter has no master that would keep more."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _reference(make_optimizer, dtype, accumulation):
    reference = PlainTrainer(_make_model(), rank_and_world()[1], make_optimizer, DTYPES[dtype],
                             accumulation=accumulation)  # fmt: skip
    _set(reference.model, FROZEN, False)
    return reference


def _engine(stage, dtype, accumulation, make_optimizer, **more):
    model = _make_model()
    _set(model, FROZEN, False)
    config = config_of(stage, dtype, accumulation, optimizer=make_optimizer is None, **more)
    optimizer = None if make_optimizer is None else make_optimizer(model.parameters())
    return make_engine(model, config, optimizer=optimizer)


def _step(engine, reference, batches, where):
    rank, _ = rank_and_world()
    for tokens in batches:
        expected = reference.micro_step(tokens, loss_of)
        loss = loss_of(engine, tokens[rank])
        engine.backward(loss)
        assert loss.item() == expected[rank], where
        engine.step()
    reference.step(engine.get_global_grad_norm())
    assert engine.get_global_grad_norm() == pytest.approx(reference.norm, rel=NORM_TOLERANCE), where
    assert differences(full_parameters(engine.module), reference.values()) == [], where


def _staged(stage, dtype, accumulation, make_optimizer, folder, **more):
    _, world = rank_and_world()
    engine = _engine(stage, dtype, accumulation, make_optimizer, **more)
    reference = _reference(make_optimizer or _adamw, dtype, accumulation)
    batches = make_batches(STEPS * accumulation, world)
    for step in range(STEPS):
        where = (stage, dtype, accumulation, make_optimizer, step)
        for model in (engine.module, reference.model) if step in CHANGES else ():
            _set(model, *CHANGES[step])
        _step(engine, reference, batches[step * accumulation : (step + 1) * accumulation], where)
        if step == 3:  # goes on in an engine that begins as this one did
            engine.save_checkpoint(str(folder))
            engine.destroy()
            engine = _engine(stage, dtype, accumulation, make_optimizer, **more)
            engine.load_checkpoint(str(folder))
            _set(engine.module, *CHANGES[2])
            _set(engine.module, *CHANGES[3])
    engine.destroy()


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def _grid(folder, whole):
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            own = [None, _adamw] if whole else [(_adamw if stage % 2 else None)]
            for make_optimizer in (*own, *((_momentum, _adagrad) if whole else (_momentum,))):
                for accumulation in (1, 2) if whole else (1 + stage % 2,):
                    _staged(stage, dtype, accumulation, make_optimizer, folder)
            if whole or (stage, dtype) in ((1, "bf16"), (3, "fp32")):
                more = {"zero_optimization": {"stage": stage, **OFFLOADED["zero_optimization"]}}
                if stage == 3 and not (shares_a_gpu() and rank_and_world()[1] > 1):  # NCCL gathers offloaded weights
                    more["zero_optimization"]["offload_param"] = {"device": "cpu"}
                _staged(stage, dtype, 1, None, folder, **more)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_unfrozen_trains_as_in_plain_torch(world, tmp_path):
    run_ranks(world, _grid, tmp_path, False)


def _groups(own):
    """Parameters that were in no group get one, with values of its own, before or after they are unfrozen."""
    rank, world = rank_and_world()
    make_optimizer = _adamw if own else _momentum
    batches = make_batches(6, world)
    for stage in range(4):
        model = _make_model()
        _set(model, FROZEN, False)
        optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
        engine = make_engine(model, config_of(stage, optimizer=False), optimizer=optimizer)
        reference = _reference(make_optimizer, "fp32", 1)
        names = [name for name, _ in reference.model.named_parameters()]
        late = [i for i, name in enumerate(names) if name.startswith(FROZEN)]
        reference.optimizer = make_optimizer([m for i, m in enumerate(reference.masters) if i not in late])
        for step in range(6):
            if step == 2:
                _set(model, ("layers.0",), True)
                _set(reference.model, ("layers.0",), True)
            if step == 3:
                _set(model, ("embedding",), True)
                _set(reference.model, ("embedding",), True)
            if step == 1:
                values = {"lr": 3e-3, "weight_decay": 0.3}
                theirs = [reference.masters[i] for i in late]
                reference.optimizer.add_param_group({"params": theirs, **values})
                engine.optimizer.add_param_group(
                    {"params": [p for n, p in model.named_parameters() if n.startswith(FROZEN)], **values})
            _step(engine, reference, batches[step : step + 1], (stage, own, step))
        with pytest.raises(strata.UsageError, match="in a param group of the optimizer already"):
            engine.optimizer.add_param_group({"params": [model.head.weight]})
        with pytest.raises(strata.UsageError, match="parameters of the engine's model"):
            engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        engine.destroy()


@pytest.mark.parametrize("own", [True, False])
def test_a_group_that_is_added_trains_with_its_values(own):
    run_ranks(2, _groups, own)


def _alone():
    """One rank unfreezes a parameter that the other does not."""
    rank, world = rank_and_world()
    engine = _engine(2, "fp32", 1, None)
    batches = make_batches(2, world)
    train_step(engine, batches[0, rank])
    if rank == 0:
        _set(engine.module, ("layers.0",), True)
    try:
        train_step(engine, batches[1, rank])
    except strata.CommError as error:
        return str(error)
    return None


def test_an_unfreeze_on_one_rank_alone_is_an_error_that_names_it():
    first, second = run_ranks(2, _alone)
    assert "'layers.0." in first and "another has not" in first
    assert second is not None


def _frozen_memory():
    _, world = rank_and_world()
    engine = _engine(2, "bf16", 1, None)
    train_step(engine, make_batches(1, world)[0, rank_and_world()[0]])
    frozen = [u for u in engine.core.units() if not u["trainable"]]
    assert frozen, "what is frozen has neither masters nor moments before it is unfrozen"
    held = engine.core.memory_report()
    before = held["device", "optimizer state"][0]
    _set(engine.module, FROZEN, True)
    train_step(engine, make_batches(1, world)[0, rank_and_world()[0]])
    after = engine.core.memory_report()["device", "optimizer state"][0]
    assert after > before and engine.core.memory_forecast("device")["optimizer state"] == after
    engine.destroy()


def test_states_are_made_when_a_parameter_is_unfrozen():
    run_ranks(2, _frozen_memory)
