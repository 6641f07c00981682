"""The section torch_autocast: forward runs within torch.autocast, and parameters keep their dtype."""

import copy

import pytest
import strata
import torch
from comparison import adamw, compare, found, told
from devices import ON_GPU, test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from test_errors import error_of
from tiny_models import config_of, loss_of, make_batches, make_engine, make_model, rank_and_world

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _config(stage, dtype, **more):
    return config_of(stage, torch_autocast={"enabled": True, "dtype": dtype}, **more)


def _loss_within(dtype):
    """A loss whose model, unless it is the engine, runs within torch's own autocast."""

    def loss_function(model, tokens):
        if isinstance(model, strata.Engine):
            return loss_of(model, tokens)

        def within(tokens):
            with torch.autocast(test_device().type, dtype=dtype):
                return model(tokens)

        return loss_of(within, tokens)

    return loss_function


def _as_plain_torch():
    _, world = rank_and_world()
    for stage in range(4):
        for dtype, torch_dtype in DTYPES.items():
            scale = 65536.0 if dtype == "fp16" else 1.0
            reference = PlainTrainer(make_model(), world, adamw, None, clipping=0.05, accumulation=2, loss_scale=scale)
            compare(_config(stage, dtype, accumulation=2, clipping=0.05), reference, steps=2,
                    loss_function=_loss_within(torch_dtype), backward=told if stage % 2 else found)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_trains_as_plain_torch_within_autocast(world):
    run_ranks(world, _as_plain_torch)


class Watched(torch.nn.Linear):
    """Notes in which type it computes."""

    seen = []

    def forward(self, values):
        result = super().forward(values)
        Watched.seen.append((self.weight.dtype, result.dtype))
        if values.isnan().any():
            raise ValueError("no number")
        return result


def _where_it_reaches():
    device = test_device()
    kind = device.type
    Watched.seen.clear()
    engine = make_engine(torch.nn.Sequential(Watched(4, 4)).to(device), _config(3, "torch.bfloat16"))
    assert engine.torch_autocast_enabled() is True and engine.torch_autocast_dtype() is torch.bfloat16
    values = torch.ones(2, 4, device=device)
    engine(values)
    engine.module(values)
    with torch.no_grad():
        engine.eval()(values)
    with torch.autocast(kind, dtype=torch.float16):  # the configuration's counts
        engine(values)
        assert torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        assert torch.is_autocast_cache_enabled()
    assert Watched.seen == [(torch.float32, torch.bfloat16)] * 4
    assert not torch.is_autocast_enabled(kind)
    with pytest.raises(ValueError, match="no number"):
        engine(values * float("nan"))
    assert not torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()
    copy.deepcopy(engine.module)(values)
    assert Watched.seen[-1] == (torch.float32, torch.float32)
    engine.destroy()
    Watched.seen.clear()
    plain = make_engine(torch.nn.Sequential(Watched(4, 4)).to(device), config_of(3))
    assert plain.torch_autocast_enabled() is False and plain.torch_autocast_dtype() is None
    with torch.autocast(kind, dtype=torch.bfloat16):  # the script's own, where the configuration has none
        plain(values)
    assert Watched.seen == [(torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("world", [1, 2])
def test_reaches_the_models_forward_and_nothing_else(world):
    run_ranks(world, _where_it_reaches)


def test_a_step_that_overflows_in_fp16_is_skipped():
    engine = make_engine(make_model(), _config(2, "fp16"))
    assert engine.optimizer.loss_scale == 65536.0
    for factor, applied in ((float("inf"), False), (1.0, True)):
        engine.backward(loss_of(engine, make_batches(1, 1)[0][0]) * factor)
        engine.step()
        assert engine.was_step_applied() is applied
    assert engine.optimizer.loss_scale == 32768.0 and engine.skipped_steps == 1
    with pytest.raises(RuntimeError, match="fp16 needs a scaled loss"):
        loss_of(engine, make_batches(1, 1)[0][0]).backward()


def test_bad_sections_say_what_to_write():
    def of(section, **more):
        return error_of(make_engine, make_model(), config_of(0, torch_autocast=section, **more))

    assert of({"enabled": True}) == (
        'ConfigError: torch_autocast.dtype: wanted "bf16" or "fp16", the type in which safe operations compute; '
        "found none")
    assert "torch_autocast.dtype: wanted" in of({"enabled": True, "dtype": "int8"})
    assert "torch_autocast.enable: " in of({"enable": True})
    description_of = of({"enabled": True, "dtype": "fp16"}, bf16={"enabled": True})
    assert "torch_autocast.dtype: contradicts bf16.enabled" in description_of, description_of
    assert "lower_precision_safe_modules: wanted" in of({"lower_precision_safe_modules": 3})


@pytest.mark.skipif(ON_GPU, reason="says the same everywhere")
def test_modules_that_are_safe_are_accepted_and_travel_as_they_are(caplog):
    section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.modules.linear.Linear"]}
    with caplog.at_level("INFO", logger="strata"):
        engine = make_engine(make_model(), config_of(2, torch_autocast=section))
    assert "torch_autocast.lower_precision_safe_modules: they travel in the parameter's type" in caplog.text
    engine.destroy()
