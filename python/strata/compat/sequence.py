"""DeepSpeed's door to sequence parallelism for transformers' models, which accelerate and Trainer use."""

import torch

from .. import _C
from ..sequence import groups
from ..sequence.attention import require_possible


class UlyssesSPAttentionHF:
    """Only ``register_with_transformers`` is offered: the engine puts itself between the model and its attention."""

    @classmethod
    def register_with_transformers(cls, model_name_or_path, core_attn_implementation, sequence_parallel_size,
                                   micro_batch_size, seq_length=None, seq_length_is_variable=True, disable_in_eval=True,
                                   max_length=None):  # fmt: skip
        """Makes the groups of ``sequence_parallel_size`` ranks. Collective. Returns the ``mpu`` for ``initialize``,
        None for a size of 1. UsageError for a model that cannot train so, ConfigError for a size that does not divide
        the ranks, ValueError for another attention than the model's.

        Args:
            model_name_or_path: the model, of transformers or PEFT, or its name or path, or any object with its
                ``config``; of these the engine checks the model.
            core_attn_implementation: None: the model's own.
            seq_length, seq_length_is_variable: tokens of whole rows, which batches must have unless it is variable.
            micro_batch_size, disable_in_eval, max_length: have no effect: a batch that a ``UlyssesSPDataLoaderAdapter``
                has cut is exchanged, any other is not.
        """
        if sequence_parallel_size == 1:
            return None
        if isinstance(model_name_or_path, torch.nn.Module):
            found = require_possible(model_name_or_path, sequence_parallel_size)
        else:
            found = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if None not in (core_attn_implementation, found) and core_attn_implementation != found:
            raise ValueError(f"sp_attn_implementation: '{core_attn_implementation}' does not match model config attn_"
                             f"implementation '{found}'; leave it out, or load the model with it")
        if not seq_length_is_variable and seq_length is None:
            raise _C.UsageError("sp_seq_length: with sp_seq_length_is_variable=False every row has that "
                                "number of tokens; give it")
        groups.initialize_sequence_parallel(sequence_parallel_size)
        groups.SequenceGroup.current.tokens = None if seq_length_is_variable else seq_length
        return groups
