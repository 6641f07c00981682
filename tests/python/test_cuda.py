"""Behaviour that only a GPU can show, on one of them: STRATA_TEST_DEVICE=cuda. The other tests run there, too."""

import copy

import pytest
import torch
from comparison import adamw, compare
from devices import ON_GPU, test_device
from hf_models import MODELS
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
    train_step,
)

import strata

pytestmark = pytest.mark.skipif(
    not ON_GPU or not torch.cuda.is_available(), reason="needs a GPU and STRATA_TEST_DEVICE=cuda"
)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PRECISIONS = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def _trains_as_plain_torch(stage, dtype):
    reference = PlainTrainer(make_model(), 1, adamw, DTYPES[dtype], clipping=0.05, accumulation=2)
    compare(config_of(stage, dtype, accumulation=2, clipping=0.05), reference)


@PRECISIONS
@STAGES
def test_one_gpu_has_the_bits_of_plain_torch(stage, dtype):
    run_ranks(1, _trains_as_plain_torch, stage, dtype)


class WithBuffers(torch.nn.Module):
    """Two modules share a buffer; one parameter is not contiguous."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.BatchNorm1d(8)
        self.second = torch.nn.BatchNorm1d(8)
        self.second.running_mean = self.first.running_mean
        self.turned = torch.nn.Parameter(torch.randn(8, 6).t())

    def forward(self, values):
        return self.second(self.first(values)) @ self.turned.t()


def _moved_from_the_host():
    torch.manual_seed(0)
    model = WithBuffers()
    plain = copy.deepcopy(model).to(test_device())
    before = {name: p.detach().to(test_device()) for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    engine = make_engine(model, config_of(2))
    assert engine.device == test_device() == torch.device("cuda", torch.cuda.current_device())
    assert all(b.device == test_device() for b in model.buffers())
    assert model.first.running_mean is model.second.running_mean
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert differences({n: p.detach() for n, p in model.named_parameters()}, before) == []
    values = torch.randn(4, 8, device=test_device())
    torch.testing.assert_close(engine(values), plain(values))  # the layouts differ, so may the kernels
    engine.destroy(keep_values=True)
    assert all(p.device == test_device() for p in model.parameters())
    assert differences({n: p.detach() for n, p in model.named_parameters()}, before) == []


def test_a_model_on_the_host_moves_to_the_gpu():
    run_ranks(1, _moved_from_the_host)


def _stays_on_the_host():
    engine = make_engine(make_model().cpu(), config_of(3, strata={"device": "cpu"}))
    assert engine.device == torch.device("cpu")
    loss = loss_of(engine, make_batches(1, 1)[0, 0].cpu())
    engine.backward(loss)
    engine.step()
    assert loss.device.type == "cpu" and torch.isfinite(loss)


def test_the_configuration_keeps_a_model_on_the_host():
    run_ranks(1, _stays_on_the_host)


def _on_two_devices():
    model = make_model()
    model.head.cpu()
    with pytest.raises(strata.ConfigError, match="on cuda:0 and 'head.weight' on cpu"):
        make_engine(model, config_of(3))
    assert model.head.weight.numel() > 0


def test_parameters_on_two_devices_are_an_error():
    run_ranks(1, _on_two_devices)


def _other_streams():
    """Work of the engine is in order with the stream that is current."""
    reference = PlainTrainer(make_model(), 1, adamw)
    engine = make_engine(make_model(), config_of(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for tokens in make_batches(3, 1):
        expected = reference.micro_step(tokens, loss_of)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert train_step(engine, tokens[0]) == expected[0]
        reference.step(engine.get_global_grad_norm())
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        values = full_parameters(engine.module)
    torch.cuda.synchronize()
    assert differences(values, reference.values()) == []


def test_the_engine_follows_the_current_stream():
    run_ranks(1, _other_streams)


def _modified_and_kept():
    engine = make_engine(make_model(), config_of(3, "bf16"))
    model = engine.module
    with strata.zero.GatheredParameters([model.head.weight], modifier_rank=0), torch.no_grad():
        model.head.weight.fill_(0.5)
    tokens = make_batches(1, 1)[0, 0]
    train_step(engine, tokens)
    changed = make_model()
    with torch.no_grad():
        changed.head.weight.fill_(0.5)
    reference = PlainTrainer(changed, 1, adamw, torch.bfloat16)
    reference.micro_step(tokens[None], loss_of)
    reference.step()
    assert differences(full_parameters(model), reference.values()) == []


def test_what_is_written_to_gathered_parameters_is_trained_on():
    run_ranks(1, _modified_and_kept)


def _born_in_init():
    torch.manual_seed(0)
    with strata.zero.Init(config_dict_or_path=config_of(3)):
        model = type(make_model())()
    assert all(p.device == test_device() for p in model.parameters())


def test_a_model_is_built_on_the_gpu():
    run_ranks(1, _born_in_init)


def _loads_and_saves(source, folder, stage):
    import transformers

    config = config_of(stage, "bf16")
    plain = transformers.Qwen3ForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(test_device())
    engine, *_ = strata.load_pretrained(source, config)
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        ours, theirs = engine.module.state_dict(), plain.state_dict()
        assert differences(ours, theirs) == [] and all(v.device == test_device() for v in ours.values())
    batch = {k: v.to(test_device()) for k, v in MODELS["qwen3"].batch(torch.Generator().manual_seed(0), 0, 0).items()}
    with torch.no_grad():
        assert torch.equal(engine(**batch).logits, plain(**batch).logits)
    engine.save_pretrained(folder)
    saved = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(test_device())
    assert differences(saved.state_dict(), plain.state_dict()) == []
    strata.load_weights(engine, folder)
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        assert differences(engine.module.state_dict(), plain.state_dict()) == []
    engine.destroy()


@STAGES
def test_a_checkpoint_loads_and_saves(tmp_path, stage):
    torch.manual_seed(0)
    MODELS["qwen3"].build().save_pretrained(tmp_path / "source")
    run_ranks(1, _loads_and_saves, tmp_path / "source", tmp_path / "saved", stage)
