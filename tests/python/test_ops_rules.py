"""``strata.ops.adagrad`` and ``strata.ops.lion``: alone, and on an engine's shards."""

import pytest
import strata
import torch
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.ops.adagrad import DeepSpeedCPUAdagrad
from strata.ops.lion import DeepSpeedCPULion, FusedLion
from tiny_models import config_of, full_parameters, loss_of, make_batches, make_model, rank_and_world, train_step


def _parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((), (0,), (7, 5), (300,))]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def _give_gradients(step, *lists):
    generator = torch.Generator().manual_seed(step)
    for same in zip(*lists, strict=True):
        gradient = torch.randn(same[0].shape, generator=generator)
        for parameter in same:
            parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad_is_torchs(decay):
    ours, theirs = _parameters(), _parameters()
    optimizer = DeepSpeedCPUAdagrad(ours, lr=0.1, weight_decay=decay)
    reference = torch.optim.Adagrad(theirs, lr=0.1, weight_decay=decay, foreach=False)
    for step in range(4):
        _give_gradients(step, ours, theirs)
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(optimizer.state[one]["exp_avg_sq"], reference.state[other]["sum"])
    with pytest.raises(strata.UsageError, match="has no lr_decay"):
        DeepSpeedCPUAdagrad([{"params": ours, "lr_decay": 0.1}])


def test_adagrad_updates_the_rows_of_sparse_gradients():
    tables = [torch.nn.Embedding.from_pretrained(torch.ones(9, 4), freeze=False, sparse=s) for s in (True, False)]
    optimizers = [DeepSpeedCPUAdagrad(table.parameters(), lr=0.1) for table in tables]
    for tokens in ([1, 1, 3], [3, 8]):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor(tokens)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)
    decaying = DeepSpeedCPUAdagrad(tables[0].parameters(), weight_decay=0.1)
    with pytest.raises(strata.UsageError, match="no update for sparse gradients"):
        decaying.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [DeepSpeedCPULion, FusedLion])
def test_lion_goes_one_length_along_the_sign(kind, dtype):
    ours = _parameters(dtype)
    optimizer = kind(ours, lr=0.125, betas=(0.5, 0.75), weight_decay=0.5)
    expected = [(p.detach().float(), torch.zeros(p.shape)) for p in ours]
    kept = torch.float32 if kind is DeepSpeedCPULion else dtype
    for step in range(3):
        _give_gradients(step, ours)
        for parameter, (weight, average) in zip(ours, expected, strict=True):
            gradient = parameter.grad.float()
            weight.mul_(1 - 0.125 * 0.5).sub_(0.125 * (average * 0.5 + gradient * 0.5).sign())
            average.mul_(0.75).add_(gradient, alpha=0.25)
            weight.copy_(weight.to(dtype))
            average.copy_(average.to(kept))
        optimizer.step()
        for parameter, (weight, average) in zip(ours, expected, strict=True):
            torch.testing.assert_close(parameter.float(), weight)
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], average.to(kept))
    still = torch.nn.Parameter(torch.ones(2))
    still.grad = torch.zeros(2)
    kind([still]).step()
    assert torch.equal(still, torch.ones(2))  # no direction, no step
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours)


RULES = {
    "adagrad": lambda p: DeepSpeedCPUAdagrad(p, lr=0.05),
    "lion": lambda p: DeepSpeedCPULion(p, lr=1e-3, weight_decay=0.1),
}


def _on_shards():
    rank, world = rank_and_world()
    for stage, make in zip((2, 3), RULES.values(), strict=True):
        model = make_model()
        reference = PlainTrainer(make_model(), world, make)
        engine, *_ = strata.initialize(model=model, config=config_of(stage, optimizer=False),
                                       optimizer=make(model.parameters()))  # fmt: skip
        for tokens in make_batches(3, world):
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
        ours = full_parameters(model)
        for name, value in reference.values().items():
            torch.testing.assert_close(ours[name], value)
        engine.destroy()


def test_an_engine_runs_them_on_its_shards():
    run_ranks(2, _on_shards)
