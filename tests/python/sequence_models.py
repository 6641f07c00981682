"""Tiny causal language models and rows for tests of sequence parallelism, and the plain loop that is the measure."""

import torch
import transformers

VOCABULARY, TOKENS = 64, 16
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 256}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=4),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    "one key head": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=1),
    "windows": lambda: transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6),
    "soft caps": lambda: transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8,
                                                       final_logit_softcapping=2.0),
    "a scale": lambda: transformers.CohereConfig(**SIZES, num_key_value_heads=2, logit_scale=0.5, use_qk_norm=False),
}


def make_model(name, attention="sdpa", **changes):
    torch.manual_seed(3)
    config = CONFIGS[name]()
    config.update(changes)
    config._attn_implementation = attention
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def rows_of(kind, number, size=2, tokens=TOKENS):
    """A batch of whole rows, as collators make them."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (size, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "masked labels":  # a whole piece of them, and parts of others
        batch["labels"][:, : tokens // 2 + 1] = -100
        batch["labels"][0, -2:] = -100
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, -5:] = 0
        batch["labels"][0, -5:] = -100
    if kind == "packed":
        starts = torch.tensor([0, 5, 11])
        places = torch.arange(tokens)
        batch["position_ids"] = (places - starts[torch.searchsorted(starts, places, right=True) - 1]).repeat(size, 1)
        batch["labels"][:, starts] = -100
    return batch


def plain_loop(model, batches, steps_of, lr=1e-2, clipping=0.5):
    """(losses of micro-batches, norms of steps) of torch's own loop; ``steps_of`` micro-batches make a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses, norms = [], []
    for number, batch in enumerate(batches, 1):
        loss = model(**batch, use_cache=False).loss
        (loss / steps_of).backward()
        losses.append(loss.item())
        if number % steps_of == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms
