"""``p.grad`` between backward and step, against plain torch: its value, edits of it, code that may read it, and its
value where gradients are sharded."""

import copy
import io
import math

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer
from ranks import run_ranks
from strata.utils import safe_get_full_grad, safe_set_full_grad
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
)

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def _clip(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 0.1).item()


def _clip_by_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 0.01)


def _scale_the_data(parameters):
    for p in parameters:
        p.grad.data.mul_(0.5)


def _noise(parameters):
    generator = torch.Generator().manual_seed(5)
    for p in parameters:
        p.grad += torch.randn(p.grad.shape, generator=generator).to(p.grad) * 0.01


def _replace(parameters):
    for index, p in enumerate(parameters):
        p.grad = p.grad * 2 if index % 2 else torch.full_like(p.grad, 0.03)


def _drop_some(parameters):
    for index, p in enumerate(parameters):
        if index % 3 == 0:
            p.grad = None


def _look(parameters):
    return math.fsum(p.grad.double().square().sum().item() for p in parameters)


def _through_numpy(parameters):
    for p in parameters:
        if p.dtype == torch.float32 and p.device.type == "cpu":
            p.grad.clone()
            p.grad.numpy()[...] *= 0.5


EDITS = (_look, _clip, _clip_by_value, _scale_the_data, _noise, _replace, _drop_some, _through_numpy)


def _edited(reference, edit):
    """Does ``edit`` to the reference's gradients, as torch shows them in the model's dtype. Elements that it does not
    change keep their fp32 value."""
    shown = []
    for parameter, total in zip(reference.parameters, reference.sums):
        shown.append(torch.nn.Parameter(torch.empty_like(parameter)))
        shown[-1].grad = total.to(parameter.dtype)
    before = [p.grad.clone() for p in shown]
    wanted = [p for p in shown if p.numel()]
    found = edit(wanted)
    for index, (parameter, old) in enumerate(zip(shown, before)):
        if parameter.grad is None:
            reference.came[index] = False
            reference.sums[index] = torch.zeros_like(reference.sums[index])
        elif parameter.numel():
            reference.sums[index] = torch.where(parameter.grad == old, reference.sums[index], parameter.grad.float())
    return found


def _shown_of(engine):
    return [p for n, p in engine.module.named_parameters() if n != "none"]


def _cases(world):
    for stage in (0, 1, 2, 3) if world == 1 else (0, 1, 2):
        for dtype in ("fp32", "bf16"):
            for accumulation in (1, 2):
                # Sums of several passes that are reduced once have other last bits than plain torch's here.
                boundary = {"strata": {"reduce_at": "boundary"}} if accumulation == 1 else {}
                for more in ({}, OFFLOAD if stage else {}, boundary):
                    yield config_of(stage, dtype, accumulation, clipping=0.5, **more), dtype, accumulation


def _edits(every):
    """Takes every ``every``-th case of the grid, other ones for each world size."""
    rank, world = rank_and_world()
    batches = iter(make_batches(4000, world))
    for number, (config, dtype, accumulation) in enumerate(_cases(world)):
        if number % every != world % every:
            continue
        reference = PlainTrainer(make_model(), world, adamw, DTYPES[dtype], 0.5, accumulation)
        engine = make_engine(make_model(), config)
        assert all(p.grad is None for p in engine.module.parameters())
        for edit in EDITS:
            for micro in range(accumulation):
                tokens = next(batches)
                reference.micro_step(tokens, loss_of)
                engine.backward(loss_of(engine, tokens[rank]))
                if micro + 1 < accumulation:
                    engine.step()
            parameters = _shown_of(engine)
            assert all(p.grad is not None and p.grad.dtype == p.dtype for p in parameters)
            expected, found = _edited(reference, edit), edit(parameters)
            assert found == (None if expected is None else pytest.approx(expected, rel=1e-5)), (config, edit)
            if found is not None:
                for p, total in zip(parameters, [s for s in reference.sums if s.numel()]):
                    tolerance = {} if edit is _look else {"rtol": 1e-2, "atol": 1e-6}
                    torch.testing.assert_close(p.grad, total.to(p.dtype), **tolerance or {"rtol": 0.0, "atol": 0.0})
            engine.step()
            assert engine.was_step_applied() and all(p.grad is None for p in parameters)
            reference.step(engine.get_global_grad_norm())
            assert engine.get_global_grad_norm() == pytest.approx(reference.norm, rel=1e-5)
            for name, value in full_parameters(engine.module).items():
                torch.testing.assert_close(value, reference.values()[name], rtol=1e-5, atol=1e-6,
                                           msg=lambda text: f"{config} {edit} {name} {text}")
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_a_script_does_to_it_counts(world):
    run_ranks(world, _edits, 5)


def _kinds_of_precision():
    """In fp16 the shown gradient is multiplied by the loss scale; a sum narrower than fp32 is shown unchanged."""
    for more in ({"fp16": {"enabled": True, "initial_scale_power": 8}},
                 {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}):
        rank, world = rank_and_world()
        engine = make_engine(make_model(), config_of(0, **more))
        for tokens in make_batches(2, world):
            engine.backward(loss_of(engine, tokens[rank]))
            weight = engine.module.head.weight
            norm = torch.nn.utils.get_total_norm([p.grad.float() for p in _shown_of(engine)]).item()
            kept = weight.grad * 1.0
            assert torch.equal(kept, safe_get_full_grad(weight).to(weight.dtype))
            for p in _shown_of(engine):
                p.grad.mul_(0.25)
            assert torch.equal(safe_get_full_grad(weight).to(weight.dtype), kept * 0.25)
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(norm * 0.25 / engine.loss_scale(), rel=1e-2)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_scaled_as_the_loss_is(world):
    run_ranks(world, _kinds_of_precision)


def _one_rank_looks():
    rank, world = rank_and_world()
    for more in ({}, {"strata": {"reduce_at": "boundary"}}):
        engine, other = (make_engine(make_model(), config_of(0, "bf16", clipping=0.5, **more)) for _ in range(2))
        for step, tokens in enumerate(make_batches(3, world)):
            for each in (engine, other):
                each.backward(loss_of(each, tokens[rank]))
            if rank == step % world:
                assert engine.module.head.weight.grad.abs().sum() > 0
                assert engine.module.layers[0].up.weight.grad.abs().sum() > 0
            for each in (engine, other):
                each.step()
            assert differences(full_parameters(engine.module), full_parameters(other.module)) == []
        engine.destroy()
        other.destroy()


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_may_look_alone_before_a_step(world):
    run_ranks(world, _one_rank_looks)


def _sharded():
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    engine, other = (make_engine(make_model(), config_of(3, live_bytes=1)) for _ in range(2))
    for batch in tokens:
        for each in (engine, other):
            each.backward(loss_of(each, batch[rank]))
        for look in (_clip, lambda parameters: _look([p for p in parameters if p.grad is not None])):
            with pytest.raises(RuntimeError, match="stage 3.*safe_get_full_grad.*get_global_grad_norm.*gradient_clip"):
                look(engine.module.parameters())
        assert engine.module.head.weight.grad.shape == (11, 16)
        weight = engine.module.head.weight
        gradient = safe_get_full_grad(weight)
        with strata.zero.GatheredParameters([weight]):
            weight.grad = gradient * 2
        engine.step()
        safe_set_full_grad(other.module.head.weight, gradient * 2)
        other.step()
        assert differences(full_parameters(engine.module), full_parameters(other.module)) == []
    engine.destroy()
    other.destroy()


def test_where_it_is_sharded_it_says_what_to_call():
    run_ranks(2, _sharded)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.used(x * self.frozen)


def _unused():
    for stage in (0, 3):
        engine = make_engine(make_model(Unused), config_of(stage))
        before = full_parameters(engine.module)
        engine.backward(engine(torch.ones(4, 4)).square().mean())
        assert engine.module.unused.weight.grad is None and engine.module.frozen.grad is None
        engine.module.unused.bias.grad = torch.ones_like(engine.module.unused.bias)  # a script's own
        engine.step()
        changed = differences(full_parameters(engine.module), before)
        assert sorted(changed) == ["unused.bias", "used.bias", "used.weight"]
        engine.destroy()


def test_a_parameter_without_one_shows_none():
    run_ranks(1, _unused)


def _kept():
    rank, world = rank_and_world()
    tokens = make_batches(3, world)
    engine = make_engine(make_model(), config_of(0))
    weight, bias = engine.module.head.weight, engine.module.head.bias
    engine.backward(loss_of(engine, tokens[0, rank]))
    with pytest.raises(RuntimeError, match="read it with an operator of torch first"):
        weight.grad.data_ptr()
    with pytest.raises(RuntimeError, match="same size"):
        weight.grad = torch.zeros(3, device=weight.device)
    copied = copy.deepcopy(engine.module)
    assert copied.head.weight.grad is None and type(copied.head.weight) is torch.nn.Parameter
    torch.save(engine.module.state_dict(), io.BytesIO())
    kept = bias.grad
    values = kept.clone()
    engine.step()
    engine.backward(loss_of(engine, tokens[1, rank]))
    assert torch.equal(kept, values) and not torch.equal(bias.grad, values)
    engine.step()
    engine.backward(loss_of(engine, tokens[2, rank]))
    unread = weight.grad
    engine.step()
    with pytest.raises(RuntimeError, match="kept without its values, and its step is over"):
        unread.sum()
    engine.destroy()
    assert weight.grad is None


@pytest.mark.parametrize("world", [1, 2])
def test_a_tensor_that_a_script_keeps_keeps_its_values(world):
    run_ranks(world, _kept)


def _hooks():
    rank, world = rank_and_world()
    for stage in (0, 1, 2, 3):
        for accumulation in (1 + stage % 2,):
            for found in (False, True):
                engine, other = (make_engine(make_model(), config_of(stage, accumulation=accumulation))
                                 for _ in range(2))
                seen, weight = [], engine.module.layers[1].up.weight
                expected = []
                handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

                def halve(p):
                    p.grad.mul_(0.5)

                halved = engine.module.head.weight.register_post_accumulate_grad_hook(halve)
                engine.module.head.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
                other.module.layers[1].up.weight.register_hook(lambda g: expected.append(g.clone()))
                other.module.head.weight.register_hook(lambda g: g * 0.5)
                for tokens in make_batches(2 * accumulation, world):
                    for each in (engine, other):
                        loss = loss_of(each, tokens[rank])
                        loss.backward() if found else each.backward(loss)
                    if world == 1 and accumulation == 1:
                        assert torch.equal(weight.grad, seen[-1])
                    other.module.head.bias.grad = None
                    for each in (engine, other):
                        each.step()
                if found:  # divided as they will count
                    expected = [g / accumulation for g in expected]
                assert len(seen) == 2 * accumulation and all(map(torch.equal, seen, expected)), (stage, found)
                assert differences(full_parameters(engine.module), full_parameters(other.module)) == [], stage
                handle.remove()
                halved.remove()
                engine.backward(loss_of(engine, tokens[rank]))
                assert len(seen) == 2 * accumulation
                engine.destroy()
                other.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_post_accumulate_hooks_see_it_and_may_change_it(world):
    run_ranks(world, _hooks)


def _failing_hook():
    engine = make_engine(make_model(), config_of(2))
    tokens = make_batches(2, 1)

    def fail(p):
        raise ValueError("no good")

    handle = engine.module.head.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="no good"):
        engine.backward(loss_of(engine, tokens[0, 0]))
    handle.remove()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.backward(loss_of(engine, tokens[1, 0]))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_a_hook_that_fails_leaves_nothing_behind():
    run_ranks(1, _failing_hook)
