"""Inputs of checkpointed blocks on the host, from forward to backward. They are all that stays of a long row where its
blocks are computed again in backward. A copy stream takes them there beside the next block's forward, and brings each
back beside the backward of the block behind it. After the checkpoints of DeepSpeed (``cpu_checkpointing``) and Unsloth.

Used by the thread that runs forward, and by autograd's."""

import functools
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch.autograd.graph import saved_tensors_hooks

from .. import _C
from ..model import free_memory

_LEAST = 1 << 20  # bytes of an input that is worth a copy
_LEAVING = 2  # copies that the device's memory may wait for
_GRANULE = 1 << 22  # host memory is taken in multiples of it
_IN_USE = 2  # inputs on the device of which one is computed with, and one comes


class CheckpointInputs:
    """Keeps inputs of the checkpoints of one model. ``where``: "cpu": those of every block but the last go to the host;
    "auto": none where all take no more than a quarter of a GPU's free memory; else, after a step that shows what the
    computation takes, only those that the rest has no room for; "device": none.
    ``core``: a _C.ShardedModel. ``device``: torch.device of the model. ``modules``: those of transformers that can be
    checkpointed."""

    def __init__(self, core, device, where, modules):
        self._where, self._device = where, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = _HostMemory(core.host_memory, self._stream)
        self._leaving = deque()  # (event of a copy, its source)
        self._kept = {}  # {bytes of an input: inputs of this size that stay on the device}
        self._unknown = set()  # bytes of inputs that "auto" has yet to see a backward of
        self._blocks, self._all = weakref.WeakKeyDictionary(), False  # {block: its place in forward}; are all known?
        inner = [module for module in modules if {*modules} & {*module.modules()} == {module}]
        # The blocks; or a model of older transformers, which calls the checkpoints of all its blocks.
        self._expected = len(inner) if len(inner) > 1 else float("inf")
        self._last = lambda: None  # a weak reference to the last _Moved

    def take(self, module):
        """Has the checkpoints of a module of transformers keep their inputs here. Where transformers would copy inputs
        itself ("offload": True), they go to the host here."""
        if not isinstance(function := module._gradient_checkpointing_func, _Checkpoint):
            vars(module)["_gradient_checkpointing_func"] = _Checkpoint(function, self)

    def release(self, modules):
        """Undoes ``take``, and lets go of the host memory that no graph has."""
        self._host.close()
        for module in modules:
            if isinstance(function := vars(module).get("_gradient_checkpointing_func"), _Checkpoint):
                vars(module)["_gradient_checkpointing_func"] = function.__wrapped__

    def _place_of(self, function):
        """(place of the block that a checkpoint calls, number of blocks); the first forward counts them."""
        block = getattr(getattr(function, "func", function), "__self__", None)
        if not isinstance(block, torch.nn.Module):
            return 0, float("inf")
        self._all = self._all or block in self._blocks
        place = self._blocks.setdefault(block, len(self._blocks))
        return place, len(self._blocks) if self._all else self._expected

    @contextmanager
    def around(self, function, args, asked=False):
        """A context for one call of a checkpoint of ``function`` with the positional arguments ``args``. ``asked``:
        inputs of every block but the last go to the host."""
        place, blocks = self._place_of(function)
        inputs = {(x.data_ptr(), x.numel()) for x in args if isinstance(x, torch.Tensor) and x.requires_grad}

        def pack(tensor):
            size = tensor.nbytes
            wanted = (tensor.data_ptr(), tensor.numel()) in inputs and self._goes(place, blocks, size, asked)
            return self._move(tensor, place) if wanted else _Stayed(tensor)

        with saved_tensors_hooks(pack, lambda kept: kept.back()):
            yield

    def _goes(self, place, blocks, size, asked):
        if size < _LEAST or (self._where == "device" and not asked) or place >= blocks - 1:
            return False
        if self._where == "cpu" or asked:
            return True
        if size not in self._kept:
            free = free_memory.free_bytes(self._device)
            fits = free is None or min(blocks, self._expected) * size <= free // 4
            self._kept[size] = float("inf") if fits else _IN_USE
            if not fits:
                self._unknown.add(size)
        return place < blocks - self._kept[size]

    def _learn(self, size):
        """Called where backward has reached the first block: torch holds the most that this step takes, and three
        quarters of the free rest may keep inputs of this size in the next steps."""
        if size in self._unknown:
            self._unknown.remove(size)
            self._kept[size] += 3 * free_memory.untaken_bytes(self._device) // (4 * size)

    def _move(self, tensor, place):
        try:
            memory = self._host.take(tensor.nbytes)
        except _C.OutOfMemoryError:
            return _Stayed(tensor)
        self._last = weakref.ref(moved := _Moved(self, tensor, memory, place, self._last))
        with self._copying() as event:
            moved.host.copy_(tensor, non_blocking=True)
        self._leaving.append((event, _Stayed(tensor)))
        self._wait(_LEAVING)
        return moved

    def _copying(self):
        """A context whose copies come after what is queued so far, beside what is queued next; gives their event."""
        return nullcontext() if self._stream is None else _beside(self._stream)

    def _wait(self, most):
        """Leaves at most ``most`` sources of copies to the host. The device's next work is behind the other copies."""
        while len(self._leaving) > most:
            event, source = self._leaving.popleft()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            source.back()


class _Stayed:
    """One tensor on the device. With hooks on saved tensors, torch does not look whether it is changed."""

    def __init__(self, tensor):
        self._tensor, self._version = tensor.detach(), tensor._version

    def back(self):
        if self._tensor._version != self._version:
            raise _C.UsageError("the input of a checkpointed block was changed in place after its forward, so backward "
                                "cannot compute the block again; change a copy of it")
        return self._tensor


class _Moved:
    """One input. ``host``: its values, of its shape and dtype."""

    def __init__(self, inputs, tensor, memory, place, before):
        self._inputs, self._device, self._coming = inputs, tensor.device, None
        self._place, self._before = place, before
        self.host = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        weakref.finalize(self, inputs._host.give_back, memory)

    def fetch(self):
        """Begins the copy to the device."""
        if self._coming is None:
            tensor = torch.empty(self.host.shape, dtype=self.host.dtype, device=self._device)
            with self._inputs._copying() as event:
                tensor.copy_(self.host, non_blocking=True)
            if event is not None:
                tensor.record_stream(self._inputs._stream)
            self._coming = tensor, event

    def back(self):
        """The tensor on the device; the input of the block before comes beside what is computed with it."""
        self._inputs._wait(0)
        self.fetch()
        if self._place == 0:
            self._inputs._learn(self.host.nbytes)
        (tensor, event), self._coming = self._coming, None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        if (before := self._before()) is not None and before._place <= self._place:  # of the same forward
            with suppress(torch.OutOfMemoryError):  # it comes when it is needed
                before.fetch()
        return tensor


@contextmanager
def _beside(stream):
    event = torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield event
        event.record(stream)


class _HostMemory:
    """Memory that is taken again: a buffer that is large enough, or a new one in place of the smallest."""

    def __init__(self, make, stream):
        self._make, self._stream, self._free, self._closed = make, stream, [], False

    def take(self, size):
        """A uint8 tensor of at least ``size`` bytes."""
        sizes = [len(buffer) for buffer in self._free]  # give_back may append meanwhile: from gc, or another thread
        fitting = [n for n, found in enumerate(sizes) if found >= size]
        if fitting:
            return self._free.pop(min(fitting, key=sizes.__getitem__))
        if sizes:
            if self._stream is not None:
                self._stream.synchronize()  # a copy may still read the memory that goes
            self._free.pop(min(range(len(sizes)), key=sizes.__getitem__))
        return self._make(-(-size // _GRANULE) * _GRANULE)

    def give_back(self, buffer):
        if not self._closed:
            self._free.append(buffer)

    def close(self):
        self._closed, self._free = True, []


class _Checkpoint:
    """Stands for a function that transformers' blocks are checkpointed by."""

    def __init__(self, function, inputs):
        self.__wrapped__, self._inputs = function, inputs
        parts = function if isinstance(function, functools.partial) else functools.partial(function)
        self._asked = getattr(parts.func, "__name__", "") == "checkpoint_func"  # by gradient_checkpointing_enable
        self._plain = function
        if self._asked:
            self._plain = functools.partial(torch.utils.checkpoint.checkpoint, *parts.args, **parts.keywords)

    def __call__(self, function, *args, **kwargs):
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._plain(function, *args, **kwargs)
        with self._inputs.around(function, args, self._asked):
            return self._plain(function, *args, **kwargs)

    def __reduce__(self):
        return functools.partial, (self.__wrapped__,)

