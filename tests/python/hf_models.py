"""Models of the transformers library at tiny sizes, each with its batches and its blocks."""

from dataclasses import dataclass
from typing import Callable

import torch
import transformers as hf

VOCABULARY = 96
WIDTH = 32


@dataclass
class HfModel:
    """One architecture.

    Attributes:
        build: makes the model; random weights from torch's default generator.
        batch: (generator, step, rank) -> keyword arguments of forward, with labels.
        blocks: paths of the modules that must be found as blocks.
        prompt: (generator, rank) -> keyword arguments of generate; None where a model does not generate.
    """

    build: Callable
    batch: Callable
    blocks: list
    prompt: Callable = None


def _ids(generator, *shape):
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _padded_text(generator, step, rank):
    """Token ids, longer with each step; rank 1 has padding."""
    ids = _ids(generator, 2, 9 + step)
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] - 2 * rank :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _text(generator, step, rank):
    ids = _ids(generator, 2, 9 + step)
    return {"input_ids": ids, "labels": ids}


def _text_prompt(generator, rank):
    """Prompts of another length on each rank, so that ranks leave generate() at different times."""
    return {"input_ids": _ids(generator, 1, 4 + rank), "max_new_tokens": 5 + rank}


def _routed_prompt(generator, rank):
    """Without the routers' outputs, with which transformers before 5.16 cannot generate."""
    return {**_text_prompt(generator, rank), "output_router_logits": False}


def _decoder_sizes(**more):
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **_special_tokens(),
        **more,
    }


def _special_tokens():
    return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _layers(path, count=2):
    return [f"{path}.{i}" for i in range(count)]


def _qwen3():
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_decoder_sizes(head_dim=16, tie_word_embeddings=True)))


def _qwen3_moe():
    sizes = _decoder_sizes(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, output_router_logits=True))


def llama():
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder_sizes()))


def _mixtral():
    sizes = _decoder_sizes(num_local_experts=4, num_experts_per_tok=2)
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, output_router_logits=True))


def _gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **_special_tokens()))


def _bert():
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=64,
        )
    )


def _t5():
    """Encoder, decoder and head share one embedding."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def _t5_batch(generator, step, rank):
    return {"input_ids": _ids(generator, 2, 8 + step), "labels": _ids(generator, 2, 5 + rank)}


_VIT_HAS_ENCODER = hasattr(hf.models.vit.modeling_vit, "ViTEncoder")


def _vit():
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            image_size=12,
            patch_size=4,
            num_labels=16,
        )
    )


def _vit_batch(generator, step, rank):
    images = torch.rand(2, 3, 12, 12, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 16, (2,), generator=generator)}


def _whisper():
    """Leaves whole layers out in some forwards, other ones on each rank. Its encoder's positions are frozen."""
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=2 * WIDTH,
            decoder_ffn_dim=2 * WIDTH,
            max_source_positions=16,
            max_target_positions=32,
            encoder_layerdrop=0.3,
            decoder_layerdrop=0.3,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **_special_tokens(),
        )
    )


def _whisper_batch(generator, step, rank):
    return {"input_features": torch.rand(2, 16, 32, generator=generator), "labels": _ids(generator, 2, 6 + step)}


def _whisper_prompt(generator, rank):
    return {"input_features": torch.rand(1, 16, 32, generator=generator), "max_new_tokens": 5 + rank}


def _mamba():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2}
    return hf.MambaForCausalLM(hf.MambaConfig(**sizes, time_step_rank=16, **_special_tokens()))


MODELS = {
    "qwen3": HfModel(_qwen3, _padded_text, _layers("model.layers"), _text_prompt),
    "qwen3_moe": HfModel(_qwen3_moe, _padded_text, _layers("model.layers"), _routed_prompt),
    "llama": HfModel(llama, _padded_text, _layers("model.layers"), _text_prompt),
    "mixtral": HfModel(_mixtral, _padded_text, _layers("model.layers"), _routed_prompt),
    "gpt2": HfModel(_gpt2, _padded_text, _layers("transformer.h"), _text_prompt),
    "bert": HfModel(_bert, _padded_text, _layers("bert.encoder.layer")),
    "t5": HfModel(_t5, _t5_batch, _layers("encoder.block") + _layers("decoder.block"), _text_prompt),
    "vit": HfModel(_vit, _vit_batch, _layers("vit.encoder.layer" if _VIT_HAS_ENCODER else "vit.layers")),
    "whisper": HfModel(
        _whisper, _whisper_batch, _layers("model.encoder.layers") + _layers("model.decoder.layers"), _whisper_prompt
    ),
    "mamba": HfModel(_mamba, _text, _layers("backbone.layers"), _text_prompt),
}
