"""Models of transformers under zero.Init with every parameter recorded, beside the same models built plainly."""

import hashlib
import math

import torch
from ranks import run_ranks
from strata.zero import GatheredParameters, Init

# For each parameter; there are some thousand. One in a million is beyond this by chance.
LEVEL = 1e-6
DEVIATIONS = 5.5  # of a mean and of a standard deviation, likewise
SEED = 7


def config_of_birth(piece="1KiB", replay_above=0, **more):
    """Every parameter is recorded, and replayed in small pieces."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_partition_stream_chunk_size": piece, **more},
        "strata": {"init": {"replay_above": replay_above}, "timeout_s": 60},
    }


def values_under_init(build, seed, **settings):
    """{name: whole value} of the model that ``build()`` makes under zero.Init. Collective."""
    torch.manual_seed(seed)
    with Init(config_dict_or_path=config_of_birth(**settings)):
        model = build()
    with GatheredParameters(list(model.parameters())):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _digest(value):
    return hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def distance(ours, theirs):
    """The largest distance between the distributions of two samples (Kolmogorov and Smirnov)."""
    ours, theirs = ours.double().flatten().sort().values, theirs.double().flatten().sort().values
    points = torch.cat([ours, theirs])
    parts = [torch.searchsorted(one, points, right=True) / len(one) for one in (ours, theirs)]
    return (parts[0] - parts[1]).abs().max().item()


def largest_distance(ours, theirs):
    """The distance that two samples of one distribution exceed with a probability of ``LEVEL``."""
    return math.sqrt(-math.log(LEVEL / 2) / 2 * (ours + theirs) / (ours * theirs))


def unlike(ours, theirs):
    """Names a difference between the distributions of ``ours`` and ``theirs``; "" if there is none."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    ours, theirs, n = ours.double(), theirs.double(), ours.numel()
    if n == 0 or torch.equal(ours, theirs):
        return ""
    if distance(ours, theirs) > largest_distance(n, n):
        return f"distributions are {distance(ours, theirs)} apart"
    if n < 64:
        return ""
    spread = theirs.std().item()
    if (ours.mean() - theirs.mean()).abs().item() > DEVIATIONS * spread * math.sqrt(2 / n):
        return f"mean {ours.mean().item()} instead of {theirs.mean().item()}"
    # The bound is that of normal values; those of a uniform distribution spread less.
    if abs(ours.std().item() - spread) > DEVIATIONS * spread / math.sqrt(n):
        return f"deviation {ours.std().item()} instead of {spread}"
    # The largest of n normal values is rarely 1.8 times that of n others.
    middle = theirs.mean().item()
    ends = [(v - middle).abs().max().item() for v in (ours, theirs)]
    if not ends[1] / 1.8 <= ends[0] <= ends[1] * 1.8:
        return f"values up to {ends[0]} from the middle instead of {ends[1]}"
    return ""


def _build_all(builders, piece):
    found = {}
    for name, build in builders.items():
        ours = values_under_init(build, SEED, piece=piece)
        torch.manual_seed(SEED + 1)
        plain = {n: p.detach() for n, p in build().named_parameters()}
        assert ours.keys() == plain.keys(), name
        wrong = {n: text for n in ours if (text := unlike(ours[n], plain[n]))}
        found[name] = {n: _digest(v) for n, v in ours.items()}, wrong
    return found


def compare_worlds(builders):
    """Asserts that every model has the same values on 1, 2 and 3 ranks with any size of chunks, and that they have the
    distribution of a plainly built model's.

    Args:
        builders: {name: a function of a module's top level that makes a model}.
    """
    by_world = [run_ranks(world, _build_all, builders, piece, timeout=600.0)
                for world, piece in ((1, "1MiB"), (2, "1KiB"), (3, "400"))]
    found = {name: [result[name][0] for results in by_world for result in results] for name in builders}
    assert [name for name, digests in found.items() if any(one != digests[0] for one in digests)] == []
    assert {name: wrong for name, (_, wrong) in by_world[0][0].items() if wrong} == {}
