"""Tiny models of many architectures of the transformers library, each made by shrinking its own configuration."""

import torch
import transformers as hf

VOCABULARY, WIDTH, LAYERS = 96, 32, 2

# The names of sizes in configurations. A name that a configuration lacks is left out.
SIZES = {
    **dict.fromkeys(("vocab_size", "n_vocab", "encoder_vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "dim", "emb_dim"),
                    WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim",
                     "ffn_hidden_size", "hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
                     "feed_forward_proj_size", "mlp_dim", "lstm_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length",
                     "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("image_size",), 16),
    **dict.fromkeys(("patch_size",), 4),
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "attention_dropout", "attention_probs_dropout_prob",
                     "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout", "classifier_dropout",
                     "layerdrop", "encoder_layerdrop", "decoder_layerdrop", "attention_dropout_prob",
                     "summary_first_dropout"), 0.0),
}


_TEXT = """
    Afmoe Apertus Arcee Bloom BioGpt BitNet Cohere Cohere2 Cwm DiffLlama Doge Ernie4_5 Ernie4_5_Moe Exaone4 Falcon
    FalconMamba FlexOlmo Gemma Gemma2 Gemma3 Glm Glm4 Glm4Moe GPTBigCode GPTNeoX GptOss Granite GraniteMoe
    GraniteMoeShared Helium HunYuanDenseV1 JetMoe Lfm2 Llama Mamba MBart MiniMax Mistral Mixtral Mpt Nemotron Olmo
    Olmo2 Olmo3 Olmoe OPT Persimmon Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Rwkv SeedOss SmolLM3 StableLm
    Starcoder2 VaultGemma Whisper XGLM GPT2LMHeadModel OpenAIGPTLMHeadModel
"""
_MASKED = """
    Albert Bert BigBird ConvBert Deberta DebertaV2 DistilBert Electra Esm FNet IBert MobileBert ModernBert MPNet
    Nystromformer RemBert Roberta RoFormer SqueezeBert XLMRoberta Yoso
"""
_PAIRS = """
    Bart MBart Mvp ProphetNet Marian T5
"""
_IMAGES = """
    Beit Data2VecVision DeiT Dinov2 Dinov2WithRegisters IJepa
"""


_SPEECH = """
    Wav2Vec2 Hubert WavLM
"""
_BOTH = """
    CLIPModel SiglipModel
"""
IMAGE_TOKEN = 5

# Settings that the classes of speech and of several inputs need besides SIZES.
SHAPES = {
    **dict.fromkeys(("Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC"), {
        "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
        "ctc_zero_infinity": True, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
    }),
    "WhisperForConditionalGeneration": {"num_mel_bins": 8, "suppress_tokens": None, "begin_suppress_tokens": None},
}  # fmt: skip


def _names(text, suffix):
    return [name if name.endswith("Model") else name + suffix for name in text.split()]


# {class of transformers: the kind of its batches}
MODELS = {
    **dict.fromkeys(_names(_TEXT, "ForCausalLM"), "text"),
    **dict.fromkeys(_names(_MASKED, "ForMaskedLM"), "masked"),
    **dict.fromkeys(_names(_PAIRS, "ForConditionalGeneration"), "pairs"),
    **dict.fromkeys(_names(_IMAGES, "ForImageClassification"), "images"),
    **dict.fromkeys(_names(_SPEECH, "ForCTC"), "waves"),
    **dict.fromkeys(_BOTH.split(), "images and texts"),
    "LlavaForConditionalGeneration": "images in texts",
    "WhisperForConditionalGeneration": "spectra",
}
MODELS["MarianMTModel"] = MODELS.pop("MarianForConditionalGeneration")


def _known(config_class):
    attributes = {**vars(config_class()), **getattr(config_class, "attribute_map", {})}
    return {name: size for name, size in SIZES.items() if name in attributes}


def tiny_config(config_class, **more):
    """The architecture's configuration with small sizes; ``more`` goes over them."""
    config = config_class(**{**_known(config_class), **more})
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]  # T5's own has none
    return config


def _config_of(name, model_class, more):
    if MODELS.get(name) == "images and texts":
        parts = {part: {**_known(config_class), "vision_use_head": True} for part, config_class in
                 model_class.config_class.sub_configs.items()}
        return model_class.config_class(**parts, projection_dim=WIDTH, **more)
    if MODELS.get(name) == "images in texts":
        text, vision = hf.LlamaConfig(**_known(hf.LlamaConfig)), hf.CLIPVisionConfig(**_known(hf.CLIPVisionConfig))
        return model_class.config_class(
            vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **more)
    return tiny_config(model_class.config_class, **SHAPES.get(name, {}), **more)


def build(name, **more):
    """A model by the name of its class, on seeded random weights."""
    model_class = getattr(hf, name)
    torch.manual_seed(7)
    model = model_class(_config_of(name, model_class, more))
    return model.float()


def batch(kind, config, step, rank):
    """Keyword arguments of a forward with labels, other ones in each step and on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "images":
        shape = (2, getattr(config, "num_channels", 3), 16, 16)
        return {"pixel_values": torch.rand(shape, generator=generator), "labels": torch.tensor([0, 1])}
    lowest, length = (IMAGE_TOKEN + 1, 20) if kind == "images in texts" else (3, 9)
    ids = torch.randint(lowest, VOCABULARY - 6, (2, length), generator=generator)
    if kind == "waves":
        return {"input_values": torch.randn((2, 200), generator=generator), "labels": ids[:, :4]}
    if kind == "spectra":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator), "labels": ids}
    if kind.startswith("images"):
        pixels = {"pixel_values": torch.rand((2, 3, 16, 16), generator=generator)}
        if kind == "images and texts":
            return {"input_ids": ids, "return_loss": True, **pixels}
        ids[:, :16] = IMAGE_TOKEN  # one a patch
        return {"input_ids": ids, "labels": ids, **pixels}
    if kind == "pairs":
        return {"input_ids": ids, "labels": ids[:, :6].contiguous()}
    if kind == "masked":
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, "labels": ids}
