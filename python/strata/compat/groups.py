"""``deepspeed.utils.groups``: all ranks train on different data; there is no other parallelism."""

from .communication import get_all_ranks_from_group, get_rank, get_world_group, get_world_size


def get_data_parallel_group():
    """The process group of all ranks; None without one."""
    return get_world_group()


def get_data_parallel_rank():
    """int: this process's rank."""
    return get_rank()


def get_data_parallel_world_size():
    """int: the number of ranks."""
    return get_world_size()


def _get_data_parallel_group_ranks():
    return get_all_ranks_from_group()


def get_model_parallel_rank():
    """0: a model is not cut between ranks."""
    return 0


def get_model_parallel_world_size():
    """1: a model is not cut between ranks."""
    return 1


def _get_sequence_parallel_group():
    raise NotImplementedError("Strata does not offer sequence parallelism (Ulysses); set its size to 1")


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
get_tensor_model_parallel_rank = _get_sequence_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
