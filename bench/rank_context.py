"""The context of every engine's rank: a device, a process group over all ranks, and established connections."""

from types import SimpleNamespace

_WARM_BYTES = 64 << 20


def make_context(options, place):
    """The dict ``options`` as a namespace, with rank, world_size, device, on_gpu and barrier(): waits for this rank's
    device and for all ranks. Sets torch.distributed up. Collective."""
    import torch
    import torch.distributed as dist

    on_gpu = options["device"] == "cuda"
    device = torch.device("cuda", place.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    def barrier():
        if on_gpu:
            torch.cuda.synchronize(device)
        dist.barrier()

    own = {"rank": place.rank, "world_size": place.world_size, "device": device, "on_gpu": on_gpu, "barrier": barrier}
    return SimpleNamespace(**{**options, **own}, told={}, endings=[])


def warm_up(context):
    """The GPU's context, and a communicator that has made every connection it needs; the same for all engines."""
    import torch
    import torch.distributed as dist

    words = _WARM_BYTES // 4 if context.on_gpu else 1024
    one = torch.ones(words, device=context.device)
    all_of_them = torch.ones(words * context.world_size, device=context.device)
    dist.all_reduce(one)
    dist.all_gather_into_tensor(all_of_them, one)
    if context.on_gpu:
        dist.reduce_scatter_tensor(one, all_of_them)
    dist.broadcast(one, 0)
    del one, all_of_them
    context.barrier()
    if context.on_gpu:
        torch.cuda.empty_cache()
