"""Modules within wrappers of torch, ``torch.compile(layer)`` and ``checkpoint_wrapper(layer)``: no name of a unit, of a
checkpoint or of a state dict has the wrapper's, so that a plain model loads what a wrapped one has saved, and back."""

import pytest
import strata
import torch
import transformers as hf
from hf_models import llama
from ranks import run_ranks
from safetensors import safe_open
from soak import also
from tiny_models import (
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WRAPPERS = {
    "plain": lambda layer: layer,
    "torch.compile": lambda layer: torch.compile(layer, backend="eager"),
    "checkpoint_wrapper": checkpoint_wrapper,
    "both": lambda layer: torch.compile(checkpoint_wrapper(layer), backend="eager"),
}


def _wrapped(model, layers, wrapper):
    for number, layer in enumerate(layers):
        layers[number] = WRAPPERS[wrapper](layer)
    return model


NAMED = {"wrap": ["Block"]}


def _tiny(wrapper):
    model = make_model()
    return torch.compile(model, backend="eager") if wrapper == "root" else _wrapped(model, model.layers, wrapper)


def _engine(wrapper, stage, **more):
    torch._dynamo.reset()
    return make_engine(_tiny(wrapper), config_of(stage, live_bytes=1, **more))


def _goes_on(wrapper, stage, folder):
    """The losses of two steps of a plain model, and of one that goes on from the wrapped one's checkpoint, and back."""
    rank, world = rank_and_world()
    batches = make_batches(3, world)
    plain_names = list(make_model().state_dict())
    losses = []
    for names in (("plain",) * 3, ("plain", wrapper, "plain"), (wrapper, "plain", wrapper)):
        losses.append([])
        for number, name in enumerate(names):
            engine = _engine(name, stage)
            if number:
                path, _ = engine.load_checkpoint(folder / "-".join(names))
                assert path is not None
            losses[-1].append(train_step(engine, batches[number][rank]))
            engine.save_checkpoint(folder / "-".join(names))
            units = engine.core.units()
            assert not any("_orig_mod" in str(unit) or "_checkpoint_wrapped" in str(unit) for unit in units), units
            state = engine.state_dict()
            assert list(state) == plain_names or (rank > 0 and stage == 3), list(state)
            assert engine.load_state_dict(state) == ([], []) and engine.load_module_state_dict(state) == ([], [])
            engine.destroy()
    assert losses[0] == losses[1] == losses[2], (wrapper, stage)


@pytest.mark.parametrize("stage", [3, *also(0)])
@pytest.mark.parametrize("wrapper", ["torch.compile", "checkpoint_wrapper", *also("both", "root")])
def test_a_plain_model_goes_on_from_a_wrapped_one_and_back(tmp_path, wrapper, stage):
    run_ranks(2, _goes_on, wrapper, stage, tmp_path, timeout=240.0)


def test_a_wrapped_block_is_a_block_of_its_class():
    engines = [make_engine(_tiny(name), config_of(3, strata=more)) for name in WRAPPERS for more in ({}, NAMED)]
    units = [engine.core.units() for engine in engines]
    assert all(one == units[0] for one in units), units
    for engine in engines:
        engine.destroy()


def test_a_state_dict_of_torch_itself_is_taken():
    engine = make_engine(_tiny("both"), config_of(2))
    own = {name: value.clone() for name, value in engine.module.state_dict().items()}
    assert any("_orig_mod" in name for name in own)
    assert engine.load_state_dict(own) == ([], [])
    with pytest.raises(strata.UsageError, match=r"unexpected \['layers.0.other'\]"):
        engine.load_state_dict({**own, "layers.0._orig_mod.other": own["one"]})
    engine.destroy()


def _saves(folder):
    torch.manual_seed(0)
    model = llama()
    engine = make_engine(_wrapped(model, model.model.layers, "both"), config_of(3, "bf16"))
    engine.save_pretrained(folder)
    weights = {n.replace("_orig_mod._checkpoint_wrapped_module.", ""): w for n, w in full_parameters(model).items()}
    assert differences({n: p.detach() for n, p in hf.LlamaForCausalLM.from_pretrained(folder, dtype="auto").
                        named_parameters()}, weights) == []  # fmt: skip
    ids = torch.arange(3, 12)[None]
    before = engine(input_ids=ids, labels=ids).loss.item()
    strata.load_weights(engine, folder)
    assert engine(input_ids=ids, labels=ids).loss.item() == before
    engine.destroy()


def test_files_of_a_wrapped_model_are_those_of_transformers(tmp_path):
    run_ranks(2, _saves, tmp_path, timeout=120.0)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {n for n in llama().state_dict()}
