"""Scripts' usual calls between a forward and the next one, in sequence. They run in cells of stage, precision,
accumulation and offload, on one, two and three ranks, and are compared with plain torch bit by bit.

Each cell has one engine, which makes all calls; each cell takes other ways to make a call. Two ranks run every second
cell, among which are all pairs of two settings; `make soak` runs every cell, there and on one and three ranks."""

import contextlib
import itertools

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from soak import also
from test_optimizer_state import _set_weights, _through_a_file
from test_optimizer_step import WAYS as STEPS
from test_shown_gradients import _clip, _clip_by_value, _drop_some, _edited, _noise, _replace, _scale_the_data
from test_shown_gradients import _shown_of
from test_written_weights import WRITES, _follow
from test_zero_grad import WAYS as DROPS
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
)

EDITS = (_clip, _clip_by_value, _scale_the_data, _noise, _replace, _drop_some)
RULES = {"adamw": adamw, "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False)}


def _places(stage, rule, drive):
    """The placements of the optimizer's state: [the section of the configuration]."""
    if stage == 0:
        return [{}]
    cpu = {"offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        cpu["offload_param"] = {"device": "cpu"}
    if drive is None:
        return [{}, cpu]
    nvme = {"device": "nvme", "nvme_path": str(drive)}
    return [{"offload_optimizer": nvme, **({"offload_param": nvme} if stage == 3 else {})}] if rule == "adamw" else []


class Cell:
    """An engine and plain torch at the same weights.

    Args:
        number: of the cell, by which ways are chosen.
    """

    def __init__(self, number, stage, dtype, accumulation, rule, place):
        self.rank, self.world = rank_and_world()
        self.number, self.stage, self.accumulation, self.rule = number, stage, accumulation, rule
        self.dtype = dtype
        self.config = config_of(stage, dtype, accumulation, clipping=0.5, optimizer=False, zero_optimization=place,
                                zero_force_ds_cpu_optimizer=False)
        self.reference = PlainTrainer(make_model(), self.world, RULES[rule], DTYPES[dtype], 0.5, accumulation)
        self.engine = self.make_engine(seed=0)
        self.batches = iter(make_batches(60, self.world, seed=number + 1))
        self.steps = 0

    def make_engine(self, seed):
        model = make_model(seed=seed)
        return make_engine(model, self.config, optimizer=RULES[self.rule](model.parameters()))

    def way(self, ways):
        return ways[self.number % len(ways)]

    def micro_step(self, loss_function=loss_of):
        """A micro-step whose gradients count, up to its step()."""
        tokens = next(self.batches)
        expected = self.reference.micro_step(tokens, loss_function)
        loss = loss_function(self.engine, tokens[self.rank])
        assert loss.item() == expected[self.rank], self.where
        returned = self.engine.backward(loss)
        assert returned.item() == (loss / self.accumulation).item()

    def dropped_micro_steps(self):
        """The micro-steps before a step's last one; the script drops all of their gradients later."""
        for _ in range(self.accumulation - 1):
            self.engine.backward(loss_of(self.engine, next(self.batches)[self.rank]))
            self.engine.step()

    def end_step(self, update=None):
        """The boundary. ``update``: in place of ``engine.step()``."""
        with exact_square_roots():
            self.engine.step() if update is None else update()
        self.steps += 1
        assert self.engine.was_step_applied() and self.engine.skipped_steps == 0, self.where
        assert self.engine.global_steps == self.steps, self.where
        self.reference.step(self.engine.get_global_grad_norm())
        assert differences(full_parameters(self.engine.module), self.reference.values()) == [], self.where

    def step(self):
        for micro in range(self.accumulation):
            self.micro_step()
            if micro + 1 < self.accumulation:
                self.engine.step()
        self.end_step()


# --- actions of scripts, each a step ---


def _by_optimizer(cell):
    """A2: any of the objects may be asked to step."""
    for micro in range(cell.accumulation):
        tokens = next(cell.batches)
        cell.reference.micro_step(tokens, loss_of)
        last = micro + 1 == cell.accumulation
        step = lambda: cell.way(list(STEPS.values()))(cell.engine, tokens[cell.rank])  # noqa: E731
        cell.end_step(step) if last else step()


def _dropped(cell):
    """A1: a batch of NaN, and all before it, are gone; so are gradients of a forward that comes before the drop."""
    cell.dropped_micro_steps()
    cell.engine.backward(loss_of(cell.engine, next(cell.batches)[cell.rank]) * float("nan"))
    cell.way(DROPS)(cell.engine)
    cell.micro_step()
    cell.end_step()
    cell.way(DROPS)(cell.engine)  # of nothing


def _second_loss(cell):
    """A1: of two losses of one forward the first is dropped."""
    cell.dropped_micro_steps()
    tokens = next(cell.batches)
    logits = cell.engine(tokens[cell.rank]).float()
    cell.engine.backward(logits.square().mean() * float("inf"), retain_graph=True)
    cell.way(DROPS)(cell.engine)
    cell.engine.backward(logits.sin().mean())
    cell.reference.micro_step(tokens, lambda model, batch: model(batch).float().sin().mean())
    cell.end_step()


def _edited_gradients(cell):
    """A7: where a rank has whole gradients edits count."""
    if cell.stage == 3 and cell.world > 1:
        return
    for _ in range(cell.accumulation - 1):
        cell.micro_step()
        cell.engine.step()
    cell.micro_step()
    edit = cell.way(EDITS)
    expected, found = _edited(cell.reference, edit), edit(_shown_of(cell.engine))
    assert found == expected, (cell.where, edit)
    cell.end_step()


def _dropped_gradients(cell):
    """A7: None counts everywhere."""
    for _ in range(cell.accumulation - 1):
        cell.micro_step()
        cell.engine.step()
    cell.micro_step()
    _edited(cell.reference, _drop_some)
    _drop_some(_shown_of(cell.engine))
    cell.end_step()


def _hook(cell):
    """A7: a hook after accumulation counts everywhere."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    halved = cell.engine.module.head.weight.register_post_accumulate_grad_hook(halve)
    plain = cell.reference.model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    cell.step()
    halved.remove()
    plain.remove()


def _written(cell):
    """A5: weights that a script writes are those that training goes on from."""
    model, reference, write = cell.engine.module, cell.reference, cell.way(WRITES)
    cell.engine.core.wait_for_all()  # a peer may still be taking this rank's new values
    whole = all(p.numel() or name == "none" for name, p in model.named_parameters())
    context = contextlib.nullcontext()
    if not whole:
        context = strata.zero.GatheredParameters(list(model.parameters()), modifier_rank=0)
    with context, torch.no_grad():
        write(model)
    write(reference.model)
    _follow(reference)
    if cell.dtype == "bf16" and (cell.rule == "adamw" or not whole):
        _take_masters(cell)
    cell.step()


def _take_masters(cell):
    """Gives the reference the engine's masters. The engine's Adam keeps a master's remainder, also where a script wrote
    the weight, and GatheredParameters makes masters of written weights; both masters round to the weight."""
    for parameter, weight, master in zip(cell.engine.module.parameters(), cell.reference.parameters,
                                         cell.reference.masters):
        kept = strata.utils.safe_get_full_fp32_param(parameter)
        if weight.numel():
            torch.testing.assert_close(kept.to(weight.dtype), weight.detach(), rtol=0.0, atol=1e-40)
            master.data.copy_(kept)


def _resumed(cell):
    """A4: another engine goes on from states that the script saved by hand."""
    state, weights = _through_a_file(cell.engine.optimizer.state_dict()), full_parameters(cell.engine.module)
    cell.engine.destroy()
    cell.engine, cell.steps = cell.make_engine(seed=3), 0
    for part in ("weights", "optimizer") if cell.number % 2 else ("optimizer", "weights"):
        if part == "weights":
            _set_weights(cell.engine, weights)
        else:
            cell.engine.optimizer.load_state_dict(state)
    cell.step()


def _samples(cell):
    """A9: the count of samples."""
    assert cell.engine.global_samples == cell.steps * 4 * cell.world * cell.accumulation, cell.where
    cell.step()


POINTS = (Cell.step, _by_optimizer, _samples, _dropped, _second_loss, _edited_gradients, _written, _dropped_gradients,
          _hook, _resumed, Cell.step)


def _every_cell(drive=None, stride=1):
    numbers = itertools.count(rank_and_world()[1])  # other ways for each number of ranks
    grid = itertools.product(enumerate(RULES), range(4), enumerate(("fp32", "bf16")), (1, 2))
    for (of_rule, rule), stage, (of_dtype, dtype), accumulation in grid:
        for of_place, place in enumerate(_places(stage, rule, drive)):
            if (of_rule + stage + of_dtype + accumulation + of_place) % stride:
                continue
            cell = Cell(next(numbers), stage, dtype, accumulation, rule, place)
            for point in POINTS:
                cell.where = (cell.world, rule, stage, dtype, accumulation, place, point.__name__)
                point(cell)
            cell.engine.destroy()


@pytest.mark.parametrize("ranks, stride", [(2, 2), *also((1, 1), (2, 1), (3, 1))])
def test_everyday_calls_have_the_numbers_of_plain_torch(ranks, stride):
    run_ranks(ranks, _every_cell, None, stride)
