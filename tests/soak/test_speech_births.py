"""Models of speech that zero.Init builds and that train: weight_norm parametrizes their convolutions of positions; it
takes parameters over and puts others in their place while constructors run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

from comparison import adamw  # noqa: E402
from many_models import MODELS, batch, build  # noqa: E402
from plain_torch import PlainTrainer  # noqa: E402
from ranks import run_ranks  # noqa: E402
from replayed_models import config_of_birth  # noqa: E402
from strata.zero import Init  # noqa: E402
from tiny_models import config_of, differences, full_parameters, make_engine, rank_and_world  # noqa: E402

SPEECH = [name for name, kind in MODELS.items() if kind == "waves"]
STEPS = 3


def _loss_of(model, inputs):
    return model(**inputs).loss


def _trained(name, recorded):
    rank, world = rank_and_world()
    config = config_of(3, live_bytes=1)
    with Init(config_dict_or_path=config_of_birth() if recorded else config):
        model = build(name)
    parametrized = [n for n, _ in model.named_parameters() if "parametrizations" in n]
    assert len(parametrized) == 2, parametrized  # original0 and original1, a norm and a direction
    whole = sum(p.numel() for p in model.parameters())
    assert whole == (0 if world > 1 else sum(p.ds_numel for p in model.parameters()))
    plain = build(name)
    start = full_parameters(model)
    if recorded:  # random numbers are others, the same on every rank
        plain.load_state_dict(start, strict=False)
    else:
        assert differences(start, {n: p.detach() for n, p in plain.named_parameters()}) == []
    engine = make_engine(model, config)
    assert differences(full_parameters(model), start) == [], "what the engine took over"
    reference = PlainTrainer(plain, world, adamw)
    inputs = MODELS[name], plain.config
    for step in range(STEPS):
        expected = reference.micro_step([batch(*inputs, step, r) for r in range(world)], _loss_of)
        loss = _loss_of(engine, batch(*inputs, step, rank))
        assert loss.item() == expected[rank], (step, loss.item(), expected[rank])
        engine.backward(loss)
        engine.step()
        reference.step()
    values = full_parameters(model)
    assert differences(values, reference.values()) == []
    assert any(not torch.equal(values[n], start[n]) for n in parametrized)
    engine.destroy()


@pytest.mark.parametrize("recorded", [False, True], ids=["as_rank_0", "recorded"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", SPEECH)
def test_is_born_and_trains_as_plain_torch(name, world, recorded):
    run_ranks(world, _trained, name, recorded, timeout=300.0)
