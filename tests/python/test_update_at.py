"""``strata.update_at: "backward"``: the bits of updates in ``step()``; what cannot go with it is refused by name."""

import copy

import pytest
import torch
from offloaded_training import config_of, make_model, train_steps, whole_states, whole_weights
from ranks import run_ranks

import strata

WORDS = "strata.update_at"


def _config(stage, place="none", folder="/tmp", **more):
    unchecked = {"enabled": True, "check_grad_overflow": False}
    config = config_of(place, folder, stage, gradient_clipping=0.0, bf16=unchecked)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}}
    return config | more


def _with(config, at="backward"):
    return config | {"strata": {"state_cache": 0, "update_at": at}}


def _engine(config, at="backward"):
    return strata.initialize(model=make_model(3000), config=_with(config, at))[0]


def _has_the_bits_of_step(config, folder):
    results = []
    for at in ("step", "backward"):
        engine = _engine(config, at)
        losses = train_steps(engine, 3)
        engine.save_checkpoint(folder, tag=at)
        losses += train_steps(engine, 2, 3)
        results.append([losses, engine.get_global_grad_norm(), *whole_weights(engine), *whole_states(engine)])
        engine.destroy()
    assert _same(*results)
    engine = _engine(config, "backward")
    engine.load_checkpoint(folder, tag="step")
    train_steps(engine, 2, 3)
    assert _same(results[0][2:], [*whole_weights(engine), *whole_states(engine)])


def _same(one, other):
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("world, stage, place", [(1, 3, "cpu"), (2, 1, "none"), (2, 2, "cpu"), (2, 3, "nvme")])
def test_the_bits_are_those_of_step(world, stage, place, tmp_path):
    run_ranks(world, _has_the_bits_of_step, _config(stage, place, tmp_path), str(tmp_path / "saved"))


def _loss(engine):
    ids = torch.arange(24, device=engine.device).reshape(2, 12)
    return engine(ids).float().square().mean()


def _refuses_what_comes_between():
    engine = _engine(_config(3, gradient_accumulation_steps=1))
    engine.backward(_loss(engine))
    with pytest.raises(strata.UsageError, match=WORDS):
        engine.optimizer.zero_grad()
    with pytest.raises(strata.UsageError, match=WORDS):
        engine.backward(_loss(engine))
    with pytest.raises(strata.UsageError, match=WORDS):
        engine.save_checkpoint("not written")
    engine.step()
    engine.optimizer.zero_grad()
    train_steps(engine, 1)
    engine.backward(_loss(engine))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(strata.UsageError, match="has changed between"):
        engine.step()
    with pytest.raises(strata.UsageError, match="failed half-way"):
        engine(torch.zeros(2, 12, dtype=torch.long, device=engine.device))


def test_what_comes_between_backward_and_step_is_refused():
    run_ranks(1, _refuses_what_comes_between)


def _plain_loop():
    """Torch's words, which do not say which pass is the last: ``step()`` updates."""
    found = []
    for at in ("step", "backward"):
        engine = _engine(_config(2, gradient_accumulation_steps=1), at)
        for _ in range(3):
            _loss(engine).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        found.append(whole_weights(engine))
        engine.destroy()
    assert _same(*found)


def test_a_plain_loop_updates_in_step():
    run_ranks(1, _plain_loop)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: 1"),
        ({"bf16": {"enabled": True}}, "check_grad_overflow"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation"),
    ],
)
def test_what_may_stop_an_update_is_refused(change, words):
    with pytest.raises(strata.ConfigError, match=f"{WORDS}.*{words}"):
        strata.initialize(model=make_model(3000), config=_with(copy.deepcopy(_config(3)) | change))


def _refuses_other_optimizers():
    config = _with(_config(3))
    del config["optimizer"], config["scheduler"]
    model = make_model(3000)
    with pytest.raises(strata.ConfigError, match=WORDS):
        strata.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)


def test_other_optimizers_are_refused():
    run_ranks(1, _refuses_other_optimizers)
