"""Jobs of tests/python at numbers of ranks and in precisions that are not worth their time in every run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import test_client_offload as offloaded_clients  # noqa: E402
import test_client_optimizers as clients  # noqa: E402
import test_compile as compiled  # noqa: E402
import test_engine_names as names  # noqa: E402
import test_everyday_calls as everyday  # noqa: E402
import test_micro_steps as micro  # noqa: E402
import test_numerics as numerics  # noqa: E402
import test_optimizer_state as states  # noqa: E402
import test_optimizer_step as stepping  # noqa: E402
import test_passes as passes  # noqa: E402
import test_shown_gradients as shown  # noqa: E402
import test_skipped_steps as skipped  # noqa: E402
import test_unfreezing as unfreezing  # noqa: E402
import test_unused_parameters as unused  # noqa: E402
import test_written_weights as written  # noqa: E402
import test_zero_grad as zero  # noqa: E402
import test_zero_init as init  # noqa: E402
from ranks import run_ranks  # noqa: E402

JOBS = {
    "micro-steps by plain": (3, micro._micro_steps, (list(micro.MICRO_STEPS), "plain")),
    **{f"micro-steps by {how}": (3, micro._micro_steps, ([n for n in micro.MICRO_STEPS if "tensor's" not in n], how))
       for how in ("engine", "module")},
    **{f"the bits of plain torch in {dtype}": (4, numerics._matrix, (dtype,)) for dtype in ("fp32", "bf16", "fp16")},
    "eight peers": (8, numerics._over_peers, ()),
    "compiled by one rank": (1, compiled._all_stages, ()),
    "a pass that autograd runs": (3, passes._found, ((0, 1, 2),)),
    "parameters and optimizers": (3, passes._parameters_and_optimizers, ()),
    "unused": (3, unused._sweep, (False,)),
    **{f"unused, decaying, {world}": (world, unused._sweep, (True,)) for world in (1, 3)},
    **{f"unused in {dtype}": (world, unused._sweep, (False, dtype)) for world, dtype in ((2, "bf16"), (3, "fp16"))},
    **{f"skipped, {world}, {dtype}": (world, skipped._all_stages, (dtype,))
       for world, dtype in ((2, "fp32"), (1, "bf16"), (3, "fp32"), (3, "bf16"))},
    **{f"optimizer.step(), {world}": (world, stepping._ways, (range(4), (1, 2), ("fp32", "bf16"), list(stepping.WAYS)))
       for world in (1, 2, 3)},
    **{f"whole parameters, {world}": (world, clients._trained_whole, (range(4) if world == 1 else (0,),
                                                                      ("fp32", "bf16"), (1, 2), list(clients.WHOLE)))
       for world in (1, 2, 3)},
    **{f"written weights, {world}": (world, written._written, (range(4) if world == 1 else range(3),
                                                               ("fp32", "bf16", "fp16"), (1, 2), list(written.RULES)))
       for world in (1, 2, 3)},
    **{f"dropped gradients, {world}": (world, zero._dropped, (1,)) for world in (1, 2, 3, 4)},
    **{f"edited gradients, {world}": (world, shown._edits, (1,)) for world in (1, 2, 3, 4)},
    **{f"offloaded clients, {world}": (world, offloaded_clients._trained, (
        [(s, d, r) for s in (1, 2, 3) for d in ("fp32", "bf16") for r in offloaded_clients.RULES], (1, 2), (0.0, 0.1)))
       for world in (1, 2, 3)},
    **{f"states by hand, {world}": (world, states._resumed, (range(4), ("fp32", "bf16", "fp16"), list(states.RULES)))
       for world in (1, 2, 3)},
    "zero.Init": (3, init._trained, ((0, 1, 2), "fp32")),
    "zero.Init of transformers": (3, init._released_transformers, ()),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_more_worlds(job):
    world, function, arguments = JOBS[job]
    run_ranks(world, function, *arguments, timeout=600.0)


def test_names_of_the_engine_on_three_ranks(tmp_path):
    run_ranks(3, names._all, str(tmp_path), timeout=600.0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_everyday_calls_with_states_on_a_drive(world, tmp_path):
    run_ranks(world, everyday._every_cell, tmp_path, timeout=600.0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_unfreezing_in_every_way(world, tmp_path):
    run_ranks(world, unfreezing._grid, tmp_path, True, timeout=1200.0)
