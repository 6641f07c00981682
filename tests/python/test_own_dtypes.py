"""Without a precision each parameter keeps its own dtype: trained beside plain torch, loaded, saved, foreseen.

Trainable parameters are updated in fp32 and rounded to their dtype, as under bf16 and fp16. Frozen ones keep every bit,
also where their values are no floating-point numbers.
"""

import json

import pytest
import strata
import torch
from comparison import adamw, compare
from devices import needs_a_gpu_each
from hf_models import MODELS
from plain_torch import PlainTrainer
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import (
    VOCABULARY,
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
from torch import nn

WIDTH = 16


def _frozen(values):
    return nn.Parameter(values, requires_grad=False)


class Adapted(nn.Module):
    """A linear layer in bf16 that is frozen, and a trainable fp32 adapter of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + torch.relu(self.base(hidden) + self.up(self.down(hidden.float())).bfloat16())


class Mixed(nn.Module):
    """Trainable parameters of four dtypes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH).half())
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, 5, dtype=torch.float64))

    def forward(self, hidden):
        normed = self.norm(hidden.float()).bfloat16()
        shifted = torch.relu(self.up(normed)).float() * self.gain.float() + self.shift.sum().float()
        return hidden + shifted.bfloat16()


class Quantized(nn.Module):
    """Frozen weights of bytes with fp32 scales, and frozen parameters of other dtypes."""

    def __init__(self):
        super().__init__()
        self.codes = _frozen(torch.randint(0, 256, (WIDTH, WIDTH), dtype=torch.uint8))
        self.scales = _frozen(torch.rand(WIDTH, 1) / 512)
        self.order = _frozen(torch.randperm(WIDTH))
        self.mask = _frozen(torch.rand(WIDTH) > 0.2)
        self.small = _frozen(torch.randn(WIDTH).to(torch.float8_e4m3fn))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden):
        weight = (self.codes.float() - 127.0) * self.scales
        made = nn.functional.linear(hidden.float(), weight, self.bias)[..., self.order]
        return hidden + torch.where(self.mask, made, self.small.float()).bfloat16()


class Model(nn.Module):
    """Blocks of one class, or one of each, between an embedding and a head in bf16, both frozen for adapters."""

    def __init__(self, *blocks):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).bfloat16()
        self.layers = nn.ModuleList(cls() for cls in blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY).bfloat16()
        if set(blocks) == {Adapted}:
            for module in (self.embedding, self.head):
                module.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


BLOCKS = {"adapters": (Adapted,) * 3, "mixed": (Mixed,) * 3, "quantized": (Quantized,) * 2,
          "all": (Adapted, Mixed, Quantized, Adapted, Mixed, Quantized)}


def _make(kind, seed=0):
    return make_model(lambda: Model(*BLOCKS[kind]), seed)


def _trained():
    """Every kind at every stage; on three ranks, which cut parameters elsewhere, all of them as one."""
    _, world = rank_and_world()
    for kind in BLOCKS if world < 3 else ("all",):
        of_stage = {}
        for stage in range(4):
            model = _make(kind)
            reference = PlainTrainer(model, world, adamw, None, clipping=0.05, accumulation=2)
            history = compare(config_of(stage, accumulation=2, clipping=0.05), reference, lambda: _make(kind), steps=2)
            for name, parameter in model.named_parameters():
                assert history[-1][name].dtype == parameter.dtype, name
                if not parameter.requires_grad:
                    assert torch.equal(history[-1][name], parameter), name
            of_stage[stage] = history
        for stage in (1, 2, 3):
            assert [differences(ours, first) for ours, first in zip(of_stage[stage], of_stage[0])] == [[], []]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_stage_trains_each_parameter_in_its_own_dtype(world):
    run_ranks(world, _trained)


def _trained_otherwise():
    _, world = rank_and_world()
    for collectives in ("c10d", "peer"):
        reference = PlainTrainer(_make("all"), world, adamw, None)
        compare(config_of(3, live_bytes=1, strata={"collectives": collectives}), reference, lambda: _make("all"))
    for stage in (0, 3):  # an optimizer of the user's
        reference = PlainTrainer(_make("all"), world, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), None)
        model = _make("all")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        compare(config_of(stage, optimizer=False), reference, lambda: model, {"optimizer": optimizer})


@needs_a_gpu_each
def test_other_collectives_and_optimizers_do_too():
    run_ranks(2, _trained_otherwise)


def _held():
    found = []
    for stage in (0, 2, 3):
        engine = make_engine(_make("all"), config_of(stage, accumulation=2))
        rank, world = rank_and_world()
        forecast = engine.memory_forecast()
        with torch.device("meta"):
            nowhere = Model(*BLOCKS["all"])
        job = strata.memory_forecast(nowhere, config_of(stage, accumulation=2), world, device=engine.device.type)
        assert forecast == job
        for tokens in make_batches(6, world):
            train_step(engine, tokens[rank])
        peaks = {kind: peak for (tier, kind), (_, peak) in engine.memory_report().items() if tier == "device"}
        found.append((forecast, peaks))
        engine.destroy()
    return found


def test_the_ledger_says_what_was_foreseen():
    for told in run_ranks(2, _held):
        for forecast, peaks in told:
            assert peaks["gradients"] <= forecast["gradients"]
            for kind in forecast.keys() - {"gradients", "total", "workspace"}:
                assert peaks[kind] == forecast[kind], kind


def _saved_and_loaded(folder):
    for stage in (0, 3):
        engine = make_engine(_make("all"), config_of(stage))
        rank, world = rank_and_world()
        train_step(engine, make_batches(1, world)[0][rank])
        engine.save_pretrained(folder / str(stage))
        values = full_parameters(engine.module)
        engine.destroy()
        saved = load_file(folder / str(stage) / "model.safetensors")
        assert differences({name: value.cpu() for name, value in values.items()}, saved) == []
        engine = make_engine(_make("all", seed=1), config_of(stage))
        strata.load_weights(engine, folder / str(stage))
        assert differences(full_parameters(engine.module), values) == []
        engine.destroy()


def test_files_have_each_parameters_own_dtype(tmp_path):
    run_ranks(2, _saved_and_loaded, tmp_path)


def _same_as_loaded(engine, path, **how):
    import transformers

    plain = transformers.LlamaForCausalLM.from_pretrained(path, **how)
    ours = {name: value.cpu() for name, value in full_parameters(engine.module).items()}
    assert differences(ours, {name: p.detach() for name, p in plain.named_parameters()}) == []


def _as_from_pretrained(path, folder):
    for dtype in ({}, {"dtype": "auto"}, {"dtype": torch.float32}, {"dtype": "float16"}):
        engine, *_ = strata.load_pretrained(path, config_of(3), **dtype)
        _same_as_loaded(engine, path, **dtype)
        engine.save_pretrained(folder)
        _same_as_loaded(engine, folder)
        engine._collectives.barrier()
        engine.destroy()


def test_a_checkpoint_without_a_precision_has_the_dtype_that_from_pretrained_gives_it(tmp_path):
    torch.manual_seed(1)
    MODELS["llama"].build().bfloat16().save_pretrained(tmp_path / "said")
    MODELS["llama"].build().bfloat16().save_pretrained(tmp_path / "unsaid")
    config = json.loads((tmp_path / "unsaid" / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"
    (tmp_path / "unsaid" / "config.json").write_text(json.dumps(config))
    for name in ("said", "unsaid"):
        run_ranks(2, _as_from_pretrained, tmp_path / name, tmp_path / f"saved {name}")


def _refused():
    told = []
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        model = make_model()
        model.odd = nn.Parameter(torch.zeros(3, device=next(model.parameters()).device).to(dtype))
        with pytest.raises(strata.Error) as error:
            make_engine(model, config_of(3))
        told.append(str(error.value))
    return told


def test_what_cannot_be_trained_is_refused():
    for narrow, complex_ in run_ranks(2, _refused):
        assert all(word in narrow for word in ("'odd'", "float8_e4m3fn", "requires_grad=False", "float32")), narrow
        assert "ComplexFloat" in complex_ and "convert" in complex_, complex_
