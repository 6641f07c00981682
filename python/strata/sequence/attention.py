"""Attention of transformers' models over rows that are cut between ranks. ``SequenceAttention`` stands between the
attention modules of one model and the functions of ``AttentionInterface`` that they call, and changes nothing for
other models. A forward with ``shift_labels`` among its arguments is of cut rows, in training or not; any other is of
whole rows, and passes untouched.

A cut row has no mask: its ``position_ids`` tell which tokens attend to each other. A token attends to those before it,
back to the last position 0, or within the module's window. After DeepSpeed's UlyssesSPAttentionHF."""

import functools
import inspect
import weakref

import torch
import torch.distributed as dist

from .. import _C
from ..model.compiling import outside_graphs
from .exchange import group_loss, heads_for_tokens, tokens_for_heads

_MOST_MASK = 2**26  # elements of a mask that sdpa may get: rows of 8,192 tokens
_BLOCK = 4096  # tokens of a part of a document whose window is shorter
_LAYERS = {"full_attention", "sliding_attention", "attention"}
_owners = weakref.WeakKeyDictionary()  # attention and other modules of models with a SequenceAttention: that


class _Cut:
    """The rows of one forward: ``positions`` [batch, tokens of all ranks], integers; ``packed``: whether a row has
    several documents."""

    def __init__(self, local, sequence):
        parts = [torch.empty_like(local) for _ in range(sequence.size)]
        with sequence.exchanging():
            dist.all_gather(parts, local.contiguous(), group=sequence.group)
        self.positions = torch.cat(parts, dim=1)
        ascending = torch.arange(self.positions.shape[1], device=local.device)
        self.packed = not torch.equal(self.positions, ascending.expand_as(self.positions))
        self._masks, self._lengths = {}, None  # masks by window

    def mask(self, window):
        """bool [batch, 1, tokens, tokens]: whether a token (dimension 2) attends to another."""
        if window not in self._masks:
            document = (self.positions == 0).cumsum(dim=1)
            tokens = self.positions.shape[1]
            near = _near(tokens, tokens, window, document.device)
            self._masks[window] = (near & (document[:, :, None] == document[:, None, :]))[:, None]
        return self._masks[window]

    def lengths(self):
        """For each row, [tokens of a document]."""
        if self._lengths is None:
            starts = self.positions == 0
            starts[:, 0] = True
            ends = torch.nn.functional.pad(starts, (0, 1), value=True)
            self._lengths = [row.nonzero()[:, 0].diff().tolist() for row in ends]
        return self._lengths

    def attend(self, function, module, query, key, value, window, kwargs):
        """sdpa's attention within documents, and within ``window`` tokens if there is one: by a mask where it is small,
        else a document at a time, and a window's breadth of it. The output [batch, tokens, heads, size]."""
        tokens = self.positions.shape[1]
        narrow = window is not None and window < tokens
        if not self.packed and not narrow:
            return function(module, query, key, value, None, **kwargs)[0]
        if self.positions.numel() * tokens <= _MOST_MASK:
            return function(module, query, key, value, self.mask(window if narrow else None), **kwargs)[0]
        rows = []
        for lengths, *row in zip(self.lengths(), query.split(1), key.split(1), value.split(1)):
            documents = zip(*(part.split(lengths, dim=2) for part in row))
            parts = [part for document in documents for part in _parts(*document, window)]
            rows.append(torch.cat([function(module, *part, **kwargs)[0] for part in parts], dim=1))
        return torch.cat(rows)


def _near(queries, keys, window, device):
    """bool [queries, keys]: whether a query attends to a key, where the last of both are one token."""
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _parts(query, key, value, window):
    """(queries, keys, values, mask or None for a causal one) of one document, in order."""
    tokens, step = query.shape[2], max(_BLOCK, window or 0)
    if window is None or window >= tokens:
        yield query, key, value, None
        return
    for begin in range(0, tokens, step):
        end, first = min(begin + step, tokens), max(0, begin - window + 1)
        mask = _near(end - begin, end - first, window, query.device)
        yield query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end], mask[None, None]


class SequenceAttention:
    """Has ``model``, a causal language model of transformers or PEFT's wrapper of one, train on rows that the
    ``SequenceGroup`` ``sequence`` has cut. ``gathers_loss``: its output's loss becomes that of the whole rows.
    ``undo()`` takes it out again. UsageError, which names what to write instead, for models that cannot."""

    def __init__(self, model, sequence, gathers_loss):
        kind, base = require_possible(model, sequence.size), _base_of(model)
        from transformers import AttentionInterface

        self._sequence, self._gathers_loss, self._name = sequence, gathers_loss, type(base).__name__
        self._takes_cache_flag = "use_cache" in inspect.signature(base.forward).parameters
        self._cut = None  # of the last forward
        self._shift_labels, self._called, self._running = None, 0, False
        self._table = AttentionInterface()
        for module in model.modules():
            _owners[module] = self
        if not hasattr(self._table[kind], "_strata_original"):
            self._table.register(kind, _between(self._table[kind]))
        begin, end = model.register_forward_pre_hook, model.register_forward_hook
        self._handles = [begin(self._begin, with_kwargs=True), end(self._end)]

    def undo(self):
        """Takes it out of the model, and of transformers' table if no other model needs it there."""
        for handle in self._handles:
            handle.remove()
        for module in [module for module, owner in _owners.items() if owner is self]:
            del _owners[module]
        if not _owners:
            for kind, function in list(self._table.items()):
                if hasattr(function, "_strata_original"):
                    self._table.register(kind, function._strata_original)

    def _begin(self, module, args, kwargs):
        self._cut, self._called, self._running = None, 0, True
        labels = kwargs.get("shift_labels")
        if labels is None:
            return None
        labels = self._shift_labels = labels.contiguous()  # transformers' loss wants it so
        self._of_mean = kwargs.get("num_items_in_batch") is None
        positions = kwargs.get("position_ids")
        if positions is None:
            raise _C.UsageError("sequence parallelism: the batch has shift_labels, so its rows are cut, but no "
                                "position_ids, which say where; have engine.sequence_loader(loader) cut whole rows")
        if positions.dim() != 2:
            raise _C.UsageError(f"sequence parallelism: position_ids must be [batch, tokens]; found "
                                f"{list(positions.shape)}: positions of images are not supported")
        self._require_shapes(positions)
        positions._strata_cut = self._cut = _Cut(positions, self._sequence)
        kwargs = {"labels": labels, **kwargs, "attention_mask": None, "shift_labels": labels}
        if self._takes_cache_flag:
            kwargs["use_cache"] = False
        return args, kwargs

    def _require_shapes(self, positions):
        tokens = positions.shape[1] * self._sequence.size
        if self._sequence.tokens not in (None, tokens):
            raise _C.UsageError(f"sp_seq_length: {self._sequence.tokens}, and the rows of this batch have {tokens} "
                                "tokens; set sp_seq_length_is_variable=True, or pad them")
        mine = torch.tensor(positions.shape, device=positions.device)
        shapes = [torch.empty_like(mine) for _ in range(self._sequence.size)]
        with self._sequence.exchanging():
            dist.all_gather(shapes, mine, group=self._sequence.group)
        for rank, theirs in enumerate(torch.stack(shapes).tolist()):
            if theirs != list(positions.shape):
                raise _C.UsageError("sequence parallelism: a group needs pieces of equal shape; [batch, tokens] "
                                    f"is {list(positions.shape)} here, and {theirs} on rank {rank} of the group")

    def _end(self, module, args, output):
        self._running = False
        if self._cut is None:
            return None
        if self._called == 0:
            raise _C.UsageError(f"sequence parallelism: the attention of {self._name} does not call transformers' "
                                "attention functions, so its tokens would attend to one piece alone; set the size of "
                                "sequence parallelism to 1")
        if self._gathers_loss and isinstance(output, tuple):
            return group_loss(output[0], self._shift_labels, self._sequence, self._of_mean), *output[1:]
        if self._gathers_loss and getattr(output, "loss", None) is not None:
            output.loss = group_loss(output.loss, self._shift_labels, self._sequence, self._of_mean)
        return output

    def cut_of(self, kwargs):
        """The ``_Cut`` of a call of attention with these arguments; None: its rows are whole. A checkpoint that runs a
        layer again in backward, when other rows may have come, passes the same ``position_ids``."""
        positions = kwargs.get("position_ids")
        if positions is None:
            return self._cut
        if self._running and self._cut is not None:
            positions._strata_cut = self._cut  # the model may have made others
        return getattr(positions, "_strata_cut", None)

    def attend(self, cut, function, module, query, key, value, kwargs):
        """Attention of whole rows by ``function`` over this rank's heads."""
        self._called += 1
        if kwargs.get("dropout"):
            raise _C.UsageError("sequence parallelism: attention has dropout, which each rank would draw for other "
                                "heads than one rank does; set attention_dropout to 0")
        query, key, value = heads_for_tokens([query, key, value], self._sequence)
        window = kwargs.get("sliding_window")
        batch, sdpa = query.shape[0], module.config._attn_implementation == "sdpa"
        kwargs = {name: item for name, item in kwargs.items()
                  if not name.startswith(("cu_seq_lens", "max_length_", "seq_idx"))} | {"position_ids": cut.positions}
        if kwargs.get("s_aux") is not None:  # a number for each head
            kwargs["s_aux"] = kwargs["s_aux"].chunk(self._sequence.size)[self._sequence.rank]
        if not sdpa and cut.packed and batch > 1:  # documents are found in one row alone
            query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
            kwargs["position_ids"] = cut.positions.reshape(1, -1)
        groups = getattr(module, "num_key_value_groups", None)
        try:
            if groups is not None:
                module.num_key_value_groups = query.shape[1] // key.shape[1]
            if sdpa:
                output, others = cut.attend(function, module, query, key, value, window, kwargs), [None]
            else:
                output, *others = function(module, query, key, value, None, **kwargs)
        finally:
            if groups is not None:
                module.num_key_value_groups = groups
        return tokens_for_heads(output.reshape(batch, -1, *output.shape[2:]), self._sequence), *others


def _between(original):
    """``original``, of transformers' table, but for calls of modules with a ``SequenceAttention`` over cut rows."""

    @outside_graphs  # compiled code loses the gradient of an exchange
    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        owner = _owners.get(module)
        cut = None if owner is None else owner.cut_of(kwargs)
        if cut is None:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        names = list(inspect.signature(original).parameters)[5:]
        return owner.attend(cut, original, module, query, key, value, dict(zip(names, args)) | kwargs)

    attention._strata_original = original
    return attention


def _base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT's wrapper


def require_possible(model, size):
    """str: the attention of ``model``, of transformers or PEFT. UsageError where groups of ``size`` ranks cannot train
    it."""
    model = _base_of(model)
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def refuse(what):
        raise _C.UsageError(f"sequence parallelism of size {size} cannot train {type(model).__name__}: {what}")

    kind = getattr(config, "_attn_implementation", None)
    if kind is None:
        refuse("it is no model of transformers, whose attention it would exchange; set the size to 1")
    if kind != "sdpa" and "flash" not in kind:
        refuse(f'attn_implementation "{kind}" needs a mask of all tokens x all tokens; load the model with "sdpa" or '
               '"flash_attention_2"')
    for layer in getattr(config, "layer_types", None) or ():
        if layer not in _LAYERS:
            refuse(f"its layers of type {layer} carry a state along the sequence, or cut it; set the size to 1")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it has an encoder, whose tokens attend to all others; set the size to 1")
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in possible:
        refuse(f"its {heads} attention heads and {kv_heads} key heads cannot be dealt to {size} ranks; use "
               f"{', '.join(str(n) for n in possible)}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & {"dynamic", "longrope"}:
        refuse("its rotary embedding depends on the length of the row, which no rank sees whole; set the size to 1")
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    if not takes_more or not hasattr(model, "loss_function") or model.loss_type not in ("ForCausalLM", None):
        refuse("its loss is not that of each token, which takes shift_labels; set the size to 1")
    return kind
