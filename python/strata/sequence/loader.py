"""Batches of whole rows, cut for the ranks of a sequence group."""

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from .. import _C
from ..views import logger
from .groups import SequenceGroup

_OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # position_ids say it


class SequenceLoader(IterableDataset):
    """Iterates over this rank's pieces of the batches that the ranks of its group draw: the first of rank 0, of rank 1
    and so on, then their second ones. So a rank's ``loader`` must draw other rows than those of the group's others, and
    a pass has as many batches as all of theirs. Batches are dicts of tensors on the host.

    Rows that are no multiple of the ranks get tokens without labels at their end. Tensors with the rows' length at
    dimension 1 are cut; tensors of 0 and 1 dimensions, and what is no tensor, are passed whole; ``labels`` become
    ``shift_labels``, which are shifted before they are cut. ``position_ids`` are made where they are absent.
    UsageError for a tensor that cannot be cut, for left padding, and for a batch without labels.

    It answers what accelerate's ``skip_first_batches`` asks: ``dataset``, ``batch_size`` and ``drop_last`` are of the
    finished batches.

    Args:
        loader: iterable of dicts with ``input_ids`` or ``inputs_embeds``, [batch, tokens(, size)], and ``labels``.
        sequence: the ``SequenceGroup``.
    """

    batch_size = prefetch_factor = collate_fn = sampler = batch_sampler = None
    num_workers, drop_last = 0, False

    def __init__(self, loader, sequence):
        self.loader, self.sequence = loader, sequence
        self._batches = None  # of next()
        self._warned = False

    dataset = property(lambda self: self)

    def __len__(self):
        return len(self.loader) * self.sequence.size

    def __iter__(self):
        batches = iter(self.loader)
        while (found := self._exchanged(next(batches, None))) is not None:
            for batch in found:
                tokens = batch["shift_labels"].shape[1]
                yield {name: _piece(value, tokens, self.sequence) for name, value in batch.items()}

    def __next__(self):
        self._batches = iter(self) if self._batches is None else self._batches
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = None  # the next call begins anew
            raise

    def _exchanged(self, batch):
        """[the batch of each rank]; None if one of them has none left."""
        problem = None
        try:
            mine = None if batch is None else prepared(batch, self.sequence.size)
        except _C.UsageError as error:
            mine, problem = str(error), error
        batches = [None] * self.sequence.size
        with self.sequence.exchanging():
            dist.all_gather_object(batches, mine, group=self.sequence.group)
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(batches):
            if isinstance(theirs, str):
                raise _C.UsageError(f"rank {rank} of the sequence group: {theirs}")
        if any(theirs is None for theirs in batches):
            return None
        self._warn_of_equal_rows(batches)
        return batches

    def _warn_of_equal_rows(self, batches):
        first, second = batches[0].get("input_ids"), batches[1].get("input_ids")
        if self._warned or first is None or second is None or not torch.equal(first, second):
            return
        self._warned = True
        if self.sequence.rank == 0:
            logger.warning("the ranks of a sequence group draw the same rows, so each row trains %d times; give every "
                           "rank a sampler of its own part of the data", self.sequence.size)


class UlyssesSPDataLoaderAdapter(SequenceLoader):
    """``SequenceLoader`` with DeepSpeed's arguments. The group is that of ``sp_group``; ``device`` has no effect, since
    the engine moves batches."""

    def __init__(self, dl, sp_rank, sp_group, sp_world_size, device=None):
        sequence = SequenceGroup(1)
        sequence.rank, sequence.group, sequence.size = sp_rank, sp_group, sp_world_size
        super().__init__(dl, sequence)


def prepared(batch, ranks):
    """The batch with ``shift_labels`` and ``position_ids``, padded to a multiple of ``ranks``, on the host."""
    if not hasattr(batch, "items"):
        raise _C.UsageError(f"sequence parallelism cuts batches that are dicts; found {type(batch).__name__}")
    batch = {name: value for name, value in batch.items() if name not in _OF_DOCUMENTS[1:]}
    rows = batch.get("input_ids", batch.get("inputs_embeds"))
    if rows is None or batch.get("labels") is None:
        missing = "labels" if rows is not None else "input_ids"
        raise _C.UsageError(f"sequence parallelism: the batch has no '{missing}'; found {sorted(batch)}. It trains the "
                            "loss of each token: collate input_ids and labels of whole rows")
    size, tokens = rows.shape[:2]
    starts = batch.pop(_OF_DOCUMENTS[0], None)
    if batch.get("position_ids") is None:
        places = torch.arange(tokens).expand(size, tokens)
        if starts is not None:
            places = (places.flatten() - starts[torch.searchsorted(starts, places.flatten(), right=True) - 1])
        batch["position_ids"] = places.reshape(size, tokens).contiguous()
    mask = batch.pop("attention_mask", None)
    if mask is not None and (mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
        raise _C.UsageError("sequence parallelism attends causally to whole rows, and this attention_mask leaves out "
                            f"tokens before others; found shape {list(mask.shape)}. Pad on the right "
                            '(tokenizer.padding_side = "right"), or pack rows with position_ids')
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    for name, value in batch.items():
        if not torch.is_tensor(value) or value.dim() < 2:
            continue
        if value.shape[1] != tokens:
            raise _C.UsageError(f"sequence parallelism: '{name}' {list(value.shape)} of the batch has no dimension 1 "
                                f"of {tokens} tokens to cut; take it out of the batch")
        batch[name] = _padded(name, value, -tokens % ranks)
    return batch


def _padded(name, value, more):
    if more == 0:
        return value.cpu()
    end = torch.zeros(value.shape[0], more, *value.shape[2:], dtype=value.dtype)
    if name == "shift_labels":
        end.fill_(-100)
    elif name == "position_ids":
        end = value[:, -1:].cpu() + 1 + torch.arange(more)
    return torch.cat([value.cpu(), end], dim=1)


def _piece(value, tokens, sequence):
    if not torch.is_tensor(value) or value.dim() < 2:
        return value
    own = tokens // sequence.size
    return value[:, own * sequence.rank : own * (sequence.rank + 1)].contiguous()
