"""Checkpoints of Hugging Face models, loaded into shards and saved from shards, have the bits that plain
transformers loads; and every way in which a checkpoint can fail to fit."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import transformers
from devices import needs_a_gpu_each, test_device, to_test_device
from hf_models import MODELS
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from soak import also

import strata
from strata.checkpoint.load_plan import build_model
from strata.checkpoint.transformers_5 import _in_natural_order

NO_CONVERSIONS = "this transformers has no conversions that compute tensors"

DTYPES = {"float32": {}, "bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}


def _config(stage, dtype="float32", collectives="auto"):
    return {
        "strata": {"collectives": collectives},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **DTYPES[dtype],
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a checkpoint of every model, as plain transformers writes it; some in several files."""
    root = tmp_path_factory.mktemp("checkpoints")
    for number, (name, tiny) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        tiny.build().save_pretrained(root / name, max_shard_size="20KB" if number % 2 else "5GB")
    return root


def _plain(path, dtype):
    import transformers

    architecture = json.loads((Path(path) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(path, dtype=getattr(torch, dtype)).to(test_device())
    for parameter in model.parameters():  # transformers 4 leaves parameters in fp32 whose constructors say so
        parameter.data = parameter.to(getattr(torch, dtype))
    return model


def _assert_same_model(model, plain, what):
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs), what
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), (what, name)
    ours, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
    assert list(ours) == list(theirs), what
    for name, buffer in theirs.items():
        assert ours[name].dtype == buffer.dtype and torch.equal(ours[name], buffer), (what, name)


def _load_and_save(root, names, stage, dtype, folder, collectives="auto"):
    """Loads each model, compares it, saves it, and loads that again with plain transformers."""
    for name in names:
        what = (name, stage, dtype)
        engine, *_ = strata.load_pretrained(root / name, _config(stage, dtype, collectives))
        plain = _plain(root / name, dtype)
        assert engine.memory_report()[("host", "total")][1] <= 64 << 20, what  # the staging ring
        with strata.zero.GatheredParameters(list(engine.module.parameters())):
            _assert_same_model(engine.module, plain, what)
        assert not engine.module.training
        engine.save_pretrained(folder / name, max_shard_size="30KB")
        if engine.global_rank == 0:
            _assert_same_model(_plain(folder / name, dtype), plain, (*what, "saved"))
        engine.destroy()
    return True


@pytest.mark.parametrize("world, stage, dtype", [(2, 3, "float32"), *also((1, 3, "float32"), (2, 2, "bfloat16"))])
def test_every_architecture_loads_and_saves_bit_for_bit(checkpoints, tmp_path, world, stage, dtype):
    assert all(run_ranks(world, _load_and_save, checkpoints, list(MODELS), stage, dtype, tmp_path))
    for name in MODELS:  # the names that transformers writes, too: every expert's own
        assert _all_tensors(tmp_path / name).keys() == _all_tensors(checkpoints / name).keys(), name


@needs_a_gpu_each
def test_ranks_that_share_no_memory_load_and_save(checkpoints, tmp_path):
    assert all(run_ranks(2, _load_and_save, checkpoints, ["qwen3_moe", "t5"], 3, "float32", tmp_path, "c10d"))


def test_three_ranks_in_float16_save_the_same_files_as_one(checkpoints, tmp_path):
    names = ["qwen3_moe", "gpt2"]
    run_ranks(3, _load_and_save, checkpoints, names, 3, "float16", tmp_path / "three")
    run_ranks(1, _load_and_save, checkpoints, names, 1, "float16", tmp_path / "one")
    for name in names:
        for file in sorted((tmp_path / "one" / name).iterdir()):
            assert file.read_bytes() == (tmp_path / "three" / name / file.name).read_bytes(), file


def _all_tensors(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def _rewrite(source, folder, change):
    """A copy of a checkpoint in one file, with ``change({name: tensor})`` made to it."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = _all_tensors(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _train_a_step(path):
    engine, *_ = strata.load_pretrained(path, _config(3, "bfloat16"))
    engine.train()
    batch = MODELS["llama"].batch(torch.Generator().manual_seed(1), 0, engine.global_rank)
    loss = engine(**to_test_device(batch)).loss
    engine.backward(loss)
    before = engine.get_global_grad_norm()
    engine.step()
    after = engine.get_global_grad_norm()
    engine.destroy()
    return before is None and after > 0


def test_a_loaded_model_trains(checkpoints):
    assert all(run_ranks(2, _train_a_step, checkpoints / "llama"))


def _frozen(path):
    engine, *_ = strata.load_pretrained(path, _config(3))
    names = [n for n, p in engine.module.named_parameters() if not p.requires_grad]
    engine.destroy()
    return names


def test_what_the_class_freezes_stays_frozen(checkpoints):
    assert run_ranks(1, _frozen, checkpoints / "whisper") == [["model.encoder.embed_positions.weight"]]


# --- names ---


def test_older_names_a_base_models_names_and_embeddings_twice(checkpoints, tmp_path):
    """Embeddings that a file has twice are tied only if they are equal."""

    def older(tensors):
        for name in [n for n in tensors if "LayerNorm" in n]:
            tensors[name.replace(".weight", ".gamma").replace(".bias", ".beta")] = tensors.pop(name)

    def without_prefix(tensors):
        for name in [n for n in tensors if n.startswith("transformer.")]:
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    def equal(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def different(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    changes = {"bert": older, "gpt2": without_prefix, "equal": equal, "different": different}
    for name, change in changes.items():
        _rewrite(checkpoints / (name if name in MODELS else "qwen3"), tmp_path / name, change)
    assert run_ranks(1, _load_and_save, tmp_path, list(changes), 3, "float32", tmp_path / "saved")


def _llava():
    """Its files have older names than its modules, in every version of transformers."""
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, image_size=8,
                                           num_attention_heads=2, patch_size=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=MODELS["llama"].build().config)
    return transformers.LlavaForConditionalGeneration(config)


def test_a_vision_language_models_older_names_are_read_and_written(tmp_path):
    _llava().save_pretrained(tmp_path / "llava")
    assert all(run_ranks(2, _load_and_save, tmp_path, ["llava"], 3, "float32", tmp_path / "saved"))
    written = _all_tensors(tmp_path / "saved" / "llava").keys()
    assert written == _all_tensors(tmp_path / "llava").keys() != dict(_llava().named_parameters()).keys()


def _load_transposed(root, folder):
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    turn = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)])
    register_checkpoint_conversion_mapping("llama", [turn], overwrite=True)
    return _load_and_save(root, ["llama"], 3, "float32", folder)


def test_a_conversion_that_moves_single_elements_is_computed(checkpoints, tmp_path):
    pytest.importorskip("transformers.conversion_mapping", reason=NO_CONVERSIONS)

    def turned(tensors):
        for name in [n for n in tensors if n.endswith("down_proj.weight")]:
            tensors[name] = tensors[name].t().contiguous()

    _rewrite(checkpoints / "llama", tmp_path / "llama", turned)
    assert all(run_ranks(2, _load_transposed, tmp_path, tmp_path / "saved"))
    assert _all_tensors(tmp_path / "saved" / "llama").keys() == _all_tensors(tmp_path / "llama").keys()
    for name, tensor in _all_tensors(tmp_path / "llama").items():
        assert torch.equal(_all_tensors(tmp_path / "saved" / "llama")[name], tensor), name


# --- any module ---


class _Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(7)
        self.body = torch.nn.Linear(7, 13)
        self.head = torch.nn.Linear(7, 13)
        self.head.weight = self.body.weight


def _load_plain(path, folder):
    engine, *_ = strata.initialize(model=_Plain(), config=_config(3))
    strata.load_weights(engine, path)
    engine.save_pretrained(folder)
    with strata.zero.GatheredParameters(list(engine.module.parameters())):
        result = {n: t.detach().cpu().clone().numpy() for n, t in engine.module.state_dict().items()}
    engine.destroy()
    return result


def test_any_module_loads_by_its_names(tmp_path):
    torch.manual_seed(3)
    model = _Plain()
    torch.nn.init.normal_(model.norm.running_mean)
    model.norm.num_batches_tracked += 5
    tensors = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    for state in run_ranks(2, _load_plain, tmp_path, tmp_path / "saved"):
        for name, value in model.state_dict().items():
            assert torch.equal(torch.as_tensor(state[name]), value), name
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[n], t) for n, t in tensors.items())


# --- errors ---


def _errors_of(cases, strict=False):
    """[(class, message)] of the error that loading raises, or None; a case has a path for each rank, or one for all."""
    errors = []
    for paths in cases:
        try:
            engine, *_ = strata.load_pretrained(paths[int(os.environ["RANK"]) % len(paths)], _config(3), strict=strict)
            engine.destroy()
            errors.append(None)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("strata")]
    return errors


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"  # where this transformers fuses the experts of its models
MISFITS = [  # model, tensor, its replacement, words of the message
    ("llama", NORM, None, [NORM, "missing"]),
    ("llama", NORM, torch.ones(31), [NORM, "31", "32"]),
    ("llama", NORM, torch.ones(32, dtype=torch.int32), [NORM, "int32"]),
    ("qwen3_moe", EXPERT, None, [FUSED]),
    ("qwen3_moe", EXPERT, torch.ones(15, 32), [FUSED]),
]


def test_a_tensor_that_does_not_fit_is_named_on_every_rank(checkpoints, tmp_path):
    fused = FUSED in dict(MODELS["qwen3_moe"].build().named_parameters())
    for number, (model, name, value, _) in enumerate(MISFITS):

        def change(tensors, name=name, value=value):
            tensors.pop(name)
            tensors.update({} if value is None else {name: value})

        _rewrite(checkpoints / model, tmp_path / str(number), change)
    for errors in run_ranks(2, _errors_of, [[tmp_path / str(number)] for number in range(len(MISFITS))]):
        for (kind, message), (*case, words) in zip(errors, MISFITS, strict=True):
            assert kind == "FormatError", (case, message)
            words = [EXPERT if word == FUSED and not fused else word for word in words]
            assert all(word in message for word in words), (case, message)


def test_what_only_one_rank_sees_is_an_error_on_every_rank(checkpoints, tmp_path):
    good, cut = checkpoints / "llama", tmp_path / "cut"
    _rewrite(good, cut, lambda tensors: None)
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size // 2)
    for truncated, absent, none in run_ranks(2, _errors_of, [[good, cut], [good, tmp_path / "nowhere"], [good]]):
        assert truncated[0] == "FormatError"
        assert "rank 1" in truncated[1] and "model.safetensors" in truncated[1]
        assert "rank 1" in absent[1] and "nowhere" in absent[1]
        assert none is None, "the ranks are still together"


def test_a_tensor_too_many_is_an_error_where_asked(checkpoints, tmp_path):
    _rewrite(checkpoints / "llama", tmp_path / "more", lambda tensors: tensors.update(extra=torch.ones(3)))
    (((kind, message),),) = run_ranks(1, _errors_of, [[tmp_path / "more"]], True)
    assert kind == "FormatError" and "extra" in message
    assert run_ranks(1, _errors_of, [[tmp_path / "more"]]) == [[None]]


def _save_nowhere(path, folder):
    engine, *_ = strata.load_pretrained(path, _config(3))
    try:
        engine.save_pretrained(folder)
    except strata.Error as error:
        return str(error)
    return None


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(checkpoints, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for message in run_ranks(2, _save_nowhere, checkpoints / "llama", tmp_path / "file"):
        assert "rank 0" in message and "file" in message


def test_tensors_are_taken_in_the_order_of_transformers():
    dot_natural_key = pytest.importorskip("transformers.core_model_loading", reason=NO_CONVERSIONS).dot_natural_key
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{weight}" for expert in (2, 10, 1) for layer in (11, 3)
             for weight in ("w10.weight", "w2.weight", "2", "")]
    names += ["b", "shard_11", "shard_2", "..a", "a.", "x.2y", "x.10y"]
    assert _in_natural_order(names) == sorted(names, key=dot_natural_key)


def test_buffers_in_the_likeness_of_parameters_are_real():
    config = transformers.IBertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                      intermediate_size=8, max_position_embeddings=8)
    model, _ = build_model(transformers.IBertForMaskedLM, config, torch.float32, {})
    plain = transformers.IBertForMaskedLM(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
