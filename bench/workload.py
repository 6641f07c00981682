"""The work of every engine in bench_cpu.py: a Qwen3 from its configuration, and batches by step and rank."""

from dataclasses import dataclass, field


@dataclass
class Workload:
    """The model, the data and the hyper-parameters; equal for every engine."""

    layers: int = 10
    hidden: int = 512
    vocabulary: int = 8192
    micro_batch: int = 2
    tokens: int = 128
    dtype: str = "fp32"
    clipping: float = 1.0
    adam: dict = field(
        default_factory=lambda: {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    )

    def build(self):
        """The model in fp32, the same on every rank and in every engine."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                intermediate_size=3 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=self.hidden // 64,
                num_key_value_heads=self.hidden // 128,
                head_dim=64,
                max_position_embeddings=max(1024, self.tokens),
                tie_word_embeddings=False,
                use_cache=False,
            )
        )

    def batch(self, step, rank, world_size):
        """[micro_batch, tokens] ids. Eight batches come again and again, so that the loss falls."""
        import torch

        generator = torch.Generator().manual_seed((step % 8) * world_size + rank)
        return torch.randint(0, self.vocabulary, (self.micro_batch, self.tokens), generator=generator)

    def block_numel(self, model):
        """Elements of one transformer block."""
        return sum(p.numel() for p in model.model.layers[0].parameters())


def loss_of(model, ids):
    """The causal language model's loss, through any wrapper's forward."""
    return model(input_ids=ids, labels=ids).loss
