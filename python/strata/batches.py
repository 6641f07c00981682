"""Batches: which micro-steps make a step of the engine, when their gradients are reduced, and loaders of data."""

from contextlib import contextmanager

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from . import _C
from .rank_logging import logger

_ROUTES = {"train": True, "eval": False, "predict": False}  # whether the route's sampler shuffles


class Batches:
    """The part of ``Engine`` that concerns samples and micro-steps."""

    _sizes = None  # (all ranks' samples of a step, samples of one forward), where a script has changed them
    _samples_before = (0, 0)  # (samples, micro-batches of a rank) until then

    # --- sizes ---

    def train_batch_size(self):
        """int: samples of all ranks in one optimizer step."""
        return self._sizes[0] if self._sizes else self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self):
        """int: samples of one rank in one forward."""
        return self._sizes[1] if self._sizes else self._config.micro_batch_size

    def gradient_accumulation_steps(self):
        """int: micro-steps of one optimizer step."""
        return self.core.accumulation_steps

    def get_batch_info(self):
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size):
        """Changes the samples of a step, by more or fewer micro-steps of the same size. Between steps, on every rank.
        UsageError where it is no multiple of the samples of all ranks in one forward."""
        micro, world_size = self.train_micro_batch_size_per_gpu(), self.dp_world_size
        in_one_forward = micro * world_size
        if train_batch_size < 1 or train_batch_size % in_one_forward != 0:
            raise _C.UsageError(f"a batch is made of micro-batches of {micro} samples on {world_size} ranks; give a "
                                f"multiple of {in_one_forward}; found {train_batch_size}")
        self._change_batch(train_batch_size, micro, train_batch_size // in_one_forward)

    def set_train_micro_batch_size(self, micro_batch_size):
        """Sets the samples of one rank in one forward; the number of micro-steps of a step does not change. The data
        loader that ``initialize`` returned keeps its batch size."""
        if micro_batch_size < 1:
            raise _C.UsageError(f"a micro-batch has at least one sample; found {micro_batch_size}")
        steps = self.gradient_accumulation_steps()
        self._change_batch(micro_batch_size * steps * self.dp_world_size, micro_batch_size, steps)

    def _change_batch(self, train, micro, steps):
        self._samples_before = (self.global_samples, _C.micro_batches(self.core))
        self.core.set_accumulation_steps(steps)
        self._sizes = (train, micro)

    @property
    def global_samples(self):
        """int: samples of all ranks so far. Each micro-step counts; where the script decides on steps
        (``managed_gradient_accumulation: false``), each backward pass before a ``step()`` counts."""
        samples, micro_batches = self._samples_before
        since = _C.micro_batches(self.core) - micro_batches
        return samples + since * self.train_micro_batch_size_per_gpu() * self.dp_world_size

    # --- micro-steps ---

    def is_gradient_accumulation_boundary(self):
        """Whether the next ``step()`` updates the weights."""
        return self.core.at_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides whether ``step()`` updates the weights. The value holds until the next call of this method; None:
        the engine counts micro-steps again."""
        self.core.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self):
        """Context in which the engine reduces nothing: gradients stay on this rank, whole and in the reduce dtype,
        until the next reduction. Unlike DeepSpeed's, it works at every stage."""
        self.core.set_synchronise(False)
        try:
            yield
        finally:
            self.core.set_synchronise(True)

    @contextmanager
    def coalesce_grad_reduction(self):
        """Context of several backward passes whose gradients the engine reduces once, in the ``step()`` after the
        context. It acts as ``no_sync()``; ``step()`` within it is an error."""
        if self.coalesces:
            raise _C.UsageError("coalesce_grad_reduction() was entered within itself; leave the inner block out")
        self.coalesces = True
        try:
            with self.no_sync():
                yield
        finally:
            self.coalesces = False

    # --- data ---

    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None,
                     collate_fn=None, num_local_io_workers=None):  # fmt: skip
        """A DataLoader over this rank's part of ``dataset``, in batches on the host. UsageError for a batch size that
        is no number, another route, and an object that is no data set.

        Args:
            dataset: map-style, with ``__len__`` and ``__getitem__``; or iterable: every rank reads all of it, unless
                the data set splits itself.
            batch_size: samples of one rank; None: ``train_micro_batch_size_per_gpu()``.
            route: "train", which shuffles (``loader.sampler.set_epoch(epoch)`` makes another order), "eval" or
                "predict", which keep the order.
            pin_memory: whether batches are in pinned memory, where the engine is on a GPU.
            data_sampler: of this rank; None: a DistributedSampler by ``route``.
            collate_fn: None: the argument of ``initialize``.
            num_local_io_workers: number of processes that load; None: none.
        """
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise _C.UsageError("deepspeed_io: batch_size is the second argument, a number of samples of at least 1, "
                                f"as in DeepSpeed; pass others by name. Found {batch_size!r}")
        if route not in _ROUTES:
            raise _C.UsageError(f"deepspeed_io: route must be one of {', '.join(_ROUTES)}; found {route!r}")
        if not (self.is_map_style_dataset(dataset) or self.is_iterable_style_dataset(dataset)):
            raise _C.UsageError("deepspeed_io: wanted a data set with __len__ and __getitem__, or an IterableDataset; "
                                f"found {type(dataset).__name__}")
        drop_last = self._config.drop_last
        if data_sampler is None:
            data_sampler = self._sampler(dataset, _ROUTES[route], drop_last and route == "train")
        loader = DataLoader(
            dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn, pin_memory=bool(pin_memory) and self.device.type == "cuda",
            drop_last=drop_last, num_workers=num_local_io_workers or 0)  # fmt: skip
        return self.sequence_loader(loader) if route == "train" else loader

    def sequence_loader(self, loader):
        """``loader`` itself or, under sequence parallelism, a ``strata.sequence.loader.SequenceLoader`` of it."""
        if self.sequence is None:
            return loader
        from .sequence.loader import SequenceLoader  # not in every script

        return SequenceLoader(loader, self.sequence)

    def _sampler(self, dataset, shuffle, drop_last):
        world_size, rank = self.world_size, self.global_rank
        if not isinstance(dataset, IterableDataset):
            return DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle, drop_last=drop_last)
        if world_size > 1 and rank == 0:
            logger.warning("%s is iterable: every rank reads all of it unless it splits itself by rank",
                           type(dataset).__name__)
        return None

    @staticmethod
    def is_map_style_dataset(obj):
        """bool: whether it has ``__getitem__`` and ``__len__``."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj):
        """bool: whether it is a ``torch.utils.data.IterableDataset``."""
        return isinstance(obj, IterableDataset)

    def set_data_post_process_func(self, post_process_func):
        """Sets ``training_dataloader.post_process_func`` and warns: Strata never calls it. DeepSpeed calls it only
        under curriculum learning, which Strata does not offer."""
        if self.training_dataloader is None:
            return
        self.training_dataloader.post_process_func = post_process_func
        if self.global_rank == 0:
            logger.warning("set_data_post_process_func: nothing calls the function, as under DeepSpeed without "
                           "curriculum learning; give it to the data set or as collate_fn")


class RepeatingLoader:
    """Iterates over ``loader`` again and again. Raises StopIteration where ``loader`` is empty."""

    def __init__(self, loader):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)

    def __len__(self):
        return len(self.loader)
