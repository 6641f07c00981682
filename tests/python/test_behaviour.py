"""Scripts' actions around the pass, at stage 3 on two ranks: exceptions, several engines, hooks, evaluation."""

import pytest
import strata
import torch
from comparison import adamw, compare
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

WORLD = 2
BOUNDS = pytest.mark.parametrize("live_bytes", ["auto", 1])


class Throws(TinyModel):
    """Throws in the middle of its second block when the test asks for it."""

    armed = False

    def __init__(self):
        super().__init__()
        self.layers[1].down.register_forward_pre_hook(self._throw)

    def _throw(self, module, arguments):
        if Throws.armed:
            raise KeyboardInterrupt("stop")


def _training_goes_on_after_an_exception(live_bytes):
    rank, _ = rank_and_world()
    reference = PlainTrainer(make_model(), WORLD, adamw)
    engine = make_engine(make_model(Throws), config_of(3, live_bytes=live_bytes))
    for step, tokens in enumerate(make_batches(4, WORLD)):
        if step == 2 or (step == 1 and rank == 0):  # also on one rank alone
            Throws.armed = True
            with pytest.raises(KeyboardInterrupt, match="stop"):
                engine(tokens[rank])
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                engine(tokens[rank])
            Throws.armed = False
        reference.micro_step(tokens, loss_of)
        train_step(engine, tokens[rank])
        reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == []
    assert all(p.numel() == 0 for p in engine.module.parameters() if p.ds_status.name != "AVAILABLE")


@BOUNDS
def test_training_goes_on_after_an_exception_in_forward(live_bytes):
    run_ranks(WORLD, _training_goes_on_after_an_exception, live_bytes)


def _add_hooks(model, calls):
    model.head.weight.register_hook(lambda gradient: gradient * 2.0)
    model.layers[1].up.bias.register_hook(lambda gradient: calls.append("tensor hook"))
    model.layers[1].down.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("stored"))
    model.layers[0].register_forward_hook(lambda module, given, result: result * 0.5)
    model.layers[0].register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))
    model.layers[2].register_full_backward_hook(lambda module, before, after: calls.append("backward hook"))


def _hooks(live_bytes):
    calls, expected = [], []
    model, other = make_model(), make_model()
    reference = PlainTrainer(other, WORLD, adamw)
    _add_hooks(model, calls)
    _add_hooks(reference.model, expected)
    compare(config_of(3, live_bytes=live_bytes), reference, lambda: model)
    assert len(calls) == 9 and len(expected) == 9 * WORLD and set(calls) == set(expected)


@BOUNDS
def test_hooks_of_the_user_are_called(live_bytes):
    run_ranks(WORLD, _hooks, live_bytes)


def _backward_twice(live_bytes):
    rank, _ = rank_and_world()
    reference = PlainTrainer(make_model(), WORLD, lambda p: torch.optim.SGD(p, lr=0.05))
    model = make_model()
    engine = make_engine(model, config_of(3, live_bytes=live_bytes, optimizer=False),
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    for tokens in make_batches(3, WORLD):
        reference.micro_step(tokens, loss_of)
        reference.micro_step(tokens, loss_of)
        loss = loss_of(engine, tokens[rank])
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        reference.step()
        assert differences(full_parameters(model), reference.values()) == []


@BOUNDS
def test_a_graph_may_be_run_twice(live_bytes):
    run_ranks(WORLD, _backward_twice, live_bytes)


def _second_engine(destroyed, keep_values, stages):
    """The same module under a second engine goes on from the first one's weights."""
    rank, _ = rank_and_world()
    model = make_model()
    first = make_engine(model, config_of(stages[0]))
    tokens = make_batches(4, WORLD)
    for batch in tokens[:2]:
        train_step(first, batch[rank])
    values = full_parameters(model)
    if destroyed:
        first.destroy(keep_values=keep_values)
        if keep_values:
            assert differences({n: p.detach() for n, p in model.named_parameters()}, values) == []
            assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    second = make_engine(model, config_of(stages[1]))
    assert differences(full_parameters(model), values) == []
    restored = make_model()
    restored.load_state_dict(values)
    reference = PlainTrainer(restored, WORLD, adamw)
    for batch in tokens[2:]:
        reference.micro_step(batch, loss_of)
        train_step(second, batch[rank])
        reference.step()
    assert differences(full_parameters(model), reference.values()) == []
    with pytest.raises(strata.UsageError, match="destroyed"):
        first.step()
    second.destroy(keep_values=True)
    assert differences({n: p.detach() for n, p in model.named_parameters()}, reference.values()) == []
    if destroyed:
        assert "forward" not in model.layers[0].__dict__ and type(model.layers[0].up._parameters) is dict
    loss = loss_of(model, tokens[0, rank])
    loss.backward()
    assert loss.item() == loss_of(reference.model, tokens[0, rank]).item() and model.head.weight.grad is not None


@each_once({"stages": [(3, 3), (3, 1), (0, 3)], "destroyed": [True, False]})
def test_a_second_engine_takes_the_module_over(destroyed, stages):
    run_ranks(WORLD, _second_engine, destroyed, True, stages)


def _evaluation_only(stage):
    rank, _ = rank_and_world()
    plain = make_model()
    engine, optimizer, loader, scheduler = strata.initialize(
        model=make_model(), config=config_of(stage, optimizer=False)
    )
    assert (optimizer, loader, scheduler) == (None, None, None)
    engine.eval()
    assert not engine.module.training
    for tokens in make_batches(3, WORLD):
        with torch.no_grad():
            assert torch.equal(engine(tokens[rank]), plain(tokens[rank]))
    engine.train()
    assert engine.module.training
    assert not any(kind == "optimizer state" and held for (_, kind), (held, _) in engine.memory_report().items())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_without_an_optimizer_evaluates(stage):
    run_ranks(WORLD, _evaluation_only, stage)


def _generator_of_parameters():
    rank, _ = rank_and_world()
    model = make_model()
    model.layers[0].requires_grad_(False)
    engine = make_engine(model, config_of(3), model_parameters=(p for p in model.parameters() if p.requires_grad))
    train_step(engine, make_batches(1, WORLD)[0, rank])
    assert engine.global_steps == 1


def test_parameters_may_come_from_a_generator():
    run_ranks(WORLD, _generator_of_parameters)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


def _data_loader():
    engine, _, loader, _ = strata.initialize(model=make_model(), config=config_of(2), training_data=Pairs())
    assert loader is engine.training_dataloader
    return [batch.tolist() for batch in loader]


def test_every_rank_gets_its_part_of_the_data():
    by_rank = run_ranks(WORLD, _data_loader)
    assert [[len(b) for b in batches] for batches in by_rank] == [[4, 4, 4]] * WORLD
    assert sorted(i for batches in by_rank for b in batches for i in b) == list(range(24))


def _rank_zero_wins(stage):
    rank, _ = rank_and_world()
    model = make_model(seed=rank)
    expected = {n: p.detach().clone() for n, p in make_model(seed=0).named_parameters()}
    make_engine(model, config_of(stage))
    assert differences(full_parameters(model), expected) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_the_values_of_rank_0_count(stage):
    run_ranks(WORLD, _rank_zero_wins, stage)
