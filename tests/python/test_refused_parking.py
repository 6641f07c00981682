"""States that were to leave the device and did not, beside an optimizer of the user's: nothing is half away."""

import pytest
import strata
import torch
from devices import shares_a_gpu
from ranks import run_ranks
from strata.client_optimizer import SegmentStates
from tiny_models import (
    config_of,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
)


def _told(call, *args, error=strata.UsageError, **kwargs):
    with pytest.raises(error) as told:
        call(*args, **kwargs)
    return str(told.value)


def _within_backward(engine, tokens):
    """A script's hook comes while gradients are made."""
    said = []
    logits = engine(tokens)
    logits.register_hook(lambda gradient: said.append(_told(engine.offload_states)))
    engine.backward(torch.nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]),
                                                      tokens.roll(1, -1).reshape(-1)))
    assert len(said) == 1 and "within a backward pass" in said[0]


def _while_weights_are_in_use(engine):
    shown = [p.grad is not None for p in engine.module.parameters()]
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        assert "in use" in _told(engine.offload_states)
    assert [p.grad is not None for p in engine.module.parameters()] == shown


def _without_memory_on_a_rank(engine):
    let_go = SegmentStates._let_go

    def fail(states):
        if engine.global_rank == engine.world_size - 1:
            raise MemoryError("no room for a state")
        let_go(states)

    SegmentStates._let_go = fail
    try:
        assert "no room for a state" in _told(engine.offload_states, error=strata.OutOfMemoryError)
    finally:
        SegmentStates._let_go = let_go
    assert "reload_states()" in _told(engine.step)  # it counts as away on every rank
    engine.reload_states()


def _trained(stage, dtype, refused, **more):
    rank, world = rank_and_world()
    model = make_model()
    sharded = {"stage3_param_persistence_threshold": 0}
    engine = make_engine(model, config_of(stage, dtype, optimizer=False, zero_optimization=sharded, **more),
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for tokens in make_batches(3, world):
        if refused:
            _within_backward(engine, tokens[rank])
            if stage == 3 and world > 1:
                _while_weights_are_in_use(engine)
            if not more:
                _without_memory_on_a_rank(engine)
            else:
                engine.offload_states(include=["lp_params"])  # which these collectives keep where they are
        else:
            engine.backward(loss_of(engine, tokens[rank]))
        engine.step()
    found = full_parameters(engine.module)
    engine.destroy()
    return found


def _refusals(cases):
    for stage, dtype, more in cases:
        wanted, found = (_trained(stage, dtype, refused, **more) for refused in (False, True))
        assert all(same_bits(found[name], wanted[name]) for name in wanted), (stage, dtype, more)


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_as_if_states_had_not_been_asked_for(world):
    gloo = {"strata": {"collectives": "c10d"}}
    cases = [(0, "bf16", {}), (2, "fp32", {}), (3, "bf16", {})]
    run_ranks(world, _refusals, cases + [(2, "bf16", gloo)] * (world == 2 and not shares_a_gpu()))
