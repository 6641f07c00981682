"""``engine.deepspeed_io``: a loader of this rank's part of a data set, with DeepSpeed's arguments."""

import logging

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from . import _C

logger = logging.getLogger("strata")

_ROUTES = {"train": True, "eval": False, "predict": False}  # whether the route's sampler shuffles


class DataLoading:
    """The part of ``Engine`` that loads data. It needs ``_config``, ``device``, ``world_size`` and ``global_rank``.

    Attributes:
        training_dataloader: of ``training_data``; None without it.
        collate_fn: the argument of ``initialize``.
    """

    training_dataloader = None
    collate_fn = None

    def deepspeed_io(self, dataset, batch_size=None, route="train", pin_memory=True, data_sampler=None,
                     collate_fn=None, num_local_io_workers=None):  # fmt: skip
        """A DataLoader over this rank's part of ``dataset``, in batches on the host.

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

        Raises:
            UsageError: for a batch size that is no number, another route, and an object that is no data set.
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
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            pin_memory=bool(pin_memory) and self.device.type == "cuda",
            drop_last=drop_last,
            num_workers=num_local_io_workers or 0,
        )

    def _sampler(self, dataset, shuffle, drop_last):
        if not isinstance(dataset, IterableDataset):
            return DistributedSampler(
                dataset, num_replicas=self.world_size, rank=self.global_rank, shuffle=shuffle, drop_last=drop_last
            )
        if self.world_size > 1 and self.global_rank == 0:
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
