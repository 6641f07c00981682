"""Models of transformers with parameters in tiles: tied heads, Conv1D, fused experts, adapters; trained against plain
torch, loaded, saved, and gone on with."""

import copy

import peft
import pytest
import strata
import torch
import transformers as hf
from devices import shares_a_gpu, test_device
from hf_models import MODELS, VOCABULARY
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import also
from tiled_models import ADAMW, OPTIMIZER
from tiny_models import differences, full_parameters, make_engine, rank_and_world
from training_states import snapshot

from strata.model.tiles import tiles_of
from strata.tiles.vocabulary_loss import LazyLogits

STEPS = 3
BYTES = {"qwen3": 3000, "gpt2": 3000, "llama": 3000, "qwen3_moe": 5000, "mixtral": 17000}  # an expert at least
NAMES = ("qwen3", "gpt2", "qwen3_moe", "mixtral")


def _config(max_gather, folder=None, **more):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": OPTIMIZER,
        "strata": {"tiles": {"max_gather": max_gather}},
        **more,
    }


def _model(name):
    torch.manual_seed(0)
    return MODELS[name].build().to(test_device()).eval()  # without dropout


def _batches(name, world):
    generator = torch.Generator().manual_seed(5)
    steps = [[MODELS[name].batch(generator, step, rank) for rank in range(world)] for step in range(STEPS)]
    return [[{k: v.to(test_device()) for k, v in batch.items()} for batch in step] for step in steps]


def _plain(model, batches):
    world = len(batches[0])
    trainer = PlainTrainer(model, world, lambda p: torch.optim.AdamW(p, **ADAMW))
    losses = []
    for step in batches:
        losses.append(trainer.micro_step(step, lambda m, batch: m(**batch).loss))
        trainer.step()
    return losses, trainer.values()


def _train(engine, batches):
    losses = []
    for step in batches:
        output = engine(**step[engine.global_rank])
        losses.append(output.loss.item())
        engine.backward(output.loss)
        engine.step()
    return losses


def _cut(model):
    return sorted(name for name, p in model.named_parameters() if tiles_of(p) is not None)


def _against_plain(name):
    rank, world = rank_and_world()
    model, batches = _model(name), _batches(name, world)
    losses, values = _plain(model, batches)
    engine = make_engine(model, _config(BYTES[name]))
    cut = _cut(model)
    ours = _train(engine, batches)
    torch.testing.assert_close(ours, [step[rank] for step in losses], rtol=1e-4, atol=1e-5)
    trained = full_parameters(model)
    for key, value in values.items():
        torch.testing.assert_close(trained[key], value,
                                   rtol=1e-4, atol=1e-5, msg=lambda m: f"{key}: {m}", check_device=False)
    generated = [engine.module.generate(**{k: v.to(test_device()) if torch.is_tensor(v) else v for k, v in
                                           MODELS[name].prompt(torch.Generator().manual_seed(1), 0).items()})]
    engine.destroy(keep_values=True)
    plain = model.generate(**{k: v.to(test_device()) if torch.is_tensor(v) else v for k, v in
                              MODELS[name].prompt(torch.Generator().manual_seed(1), 0).items()})
    assert torch.equal(generated[0], plain)
    return cut


def _all_against_plain():
    return {name: _against_plain(name) for name in NAMES}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_models_train_as_plain_torch_does(world):
    for cut in run_ranks(world, _all_against_plain):
        assert {"lm_head.weight", "model.embed_tokens.weight"} & set(cut["qwen3"])
        assert "transformer.h.0.mlp.c_fc.weight" in cut["gpt2"]  # a Conv1D
        assert "model.layers.1.mlp.experts.gate_up_proj" in cut["qwen3_moe"]
        assert "model.layers.0.mlp.experts.down_proj" in cut["mixtral"]


def _experts(name, collectives):
    """Trains a model in which each token takes two experts, in tiles of one expert and whole."""
    rank, world = rank_and_world()
    trained = []
    for config in (_config(BYTES[name]), _config(1 << 30)):
        config["strata"]["tiles"]["match"] = ["*.experts.*"]
        config["strata"]["collectives"] = collectives
        model = _model(name)
        model.set_experts_implementation("eager")
        engine = make_engine(model, config)
        cut = _cut(model)
        losses = _train(engine, _batches(name, world))
        trained.append({"losses": torch.tensor(losses), **full_parameters(model)})
        engine.destroy()
        assert cut or len(trained) == 2
    return differences(*trained)


@pytest.mark.parametrize("name, collectives", [("qwen3_moe", "c10d"), ("mixtral", "auto"),
                                               *also(("qwen3_moe", "auto"))])
def test_experts_in_tiles_train_to_the_same_bits(name, collectives):
    if collectives == "c10d" and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    assert run_ranks(2, _experts, name, collectives) == [[], []]


def _loads_and_saves(folder):
    for name in ("qwen3", "qwen3_moe"):
        model = _model(name)
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        if rank_and_world()[0] == 0:
            model.save_pretrained(folder / name)
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        engine = make_engine(model, _config(BYTES[name]))
        engine.save_pretrained(folder / f"{name}-saved", max_shard_size="30KB")
        engine.destroy()
        engine, *_ = strata.load_pretrained(folder / f"{name}-saved", _config(BYTES[name] - 800))
        assert _cut(engine.module)
        assert not differences(full_parameters(engine.module), values)
        strata.load_weights(engine, folder / f"{name}-saved")
        assert not differences(full_parameters(engine.module), values)
        engine.destroy()
        plain = type(model).from_pretrained(folder / f"{name}-saved").to(test_device())
        assert not differences({n: p.detach() for n, p in plain.named_parameters()}, values)


def test_checkpoints_of_transformers_are_read_and_written_tile_by_tile(tmp_path):
    run_ranks(2, _loads_and_saves, tmp_path)


def _goes_on(folder, max_gather, tag):
    model = _model("qwen3")
    engine = make_engine(model, _config(max_gather))
    if tag is None:
        _train(engine, [[step[0]] * engine.world_size for step in _batches("qwen3", 1)])
        engine.save_checkpoint(folder, "trained")
    else:
        engine.load_checkpoint(folder, tag)
    bits = snapshot(engine)
    engine.destroy()
    return bits


def test_training_goes_on_with_other_tiles_at_other_ranks(tmp_path):
    saved = run_ranks(2, _goes_on, tmp_path, 3000, None)[0]
    for world, max_gather in ((3, 2000), (1, 3000), (2, 1 << 30)):
        assert not differences(run_ranks(world, _goes_on, tmp_path, max_gather, "trained")[0], saved)


def _adapter():
    """LoRA on linear layers of which the frozen weights are in tiles."""
    rank, world = rank_and_world()
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(_model("llama"), lora)
    batches = _batches("llama", world)
    losses, values = _plain(model, batches)
    engine = make_engine(model, _config(3000))
    assert any("base_layer" in name for name in _cut(model))
    ours = _train(engine, batches)
    torch.testing.assert_close(ours, [step[rank] for step in losses], rtol=1e-4, atol=1e-5)
    trained = full_parameters(model)
    for key, value in values.items():
        torch.testing.assert_close(trained[key], value,
                                   rtol=1e-4, atol=1e-5, msg=lambda m: f"{key}: {m}", check_device=False)
    engine.destroy()


def test_adapters_train_on_frozen_weights_in_tiles():
    run_ranks(2, _adapter)


def _logits():
    rank, world = rank_and_world()
    model = _model("llama")
    plain, batch = copy.deepcopy(model), _batches("llama", 1)[0][0]
    engine = make_engine(model, _config(3000))
    output, wanted = engine(**batch), plain(**batch)
    assert isinstance(output.logits, LazyLogits) and output.logits.shape == wanted.logits.shape
    assert output.logits.device == wanted.logits.device and output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits[:, -1].softmax(-1), wanted.logits[:, -1].softmax(-1))
    torch.testing.assert_close(output.loss, wanted.loss)
    some = engine(**batch, num_items_in_batch=torch.tensor(7))
    torch.testing.assert_close(some.loss, plain(**batch, num_items_in_batch=torch.tensor(7)).loss)
    engine.backward(engine(**batch).loss)
    engine.step()
    with pytest.raises(strata.UsageError, match="ask for them before engine.step"):
        some.logits.argmax()
    assert output.logits.argmax() >= 0  # these were computed
    with torch.no_grad():
        assert type(engine(**batch).logits) is torch.Tensor
    assert engine.module(input_ids=batch["input_ids"]).logits.shape[-1] == VOCABULARY
    engine.destroy()
    assert "_loss_function" not in model.__dict__


def test_logits_are_computed_when_somebody_asks():
    run_ranks(2, _logits)


def _born_sharded():
    torch.manual_seed(0)
    wanted = hf.Qwen3ForCausalLM(MODELS["qwen3"].build().config)
    values = {n: p.detach().clone() for n, p in wanted.named_parameters()}
    with strata.zero.Init(config_dict_or_path=_config(3000)):
        model = hf.Qwen3ForCausalLM(wanted.config)
    with strata.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name])
    engine = make_engine(model, _config(3000))
    assert _cut(model)
    found = full_parameters(model)
    engine.destroy()
    return differences(found, values)


def test_a_model_of_zero_init_is_taken_over_tile_by_tile():
    for found in run_ranks(2, _born_sharded):
        assert found == []
