"""Losses of Strata beside those of plain torch, and beside the distance of plain torch from itself.

    python bench/step/losses.py --model qwen3-0.6b --layers 8 --world 4 --batch 2 --seq 1024
    python bench/step/losses.py --model small --world 2 --batch 2 --seq 64 --device cpu

Five engines train the same model (bf16 over fp32 masters) on the same data: plain torch, which sums gradients in the
order of ranks as Strata does; the same once more, which shows whether the model's own kernels give the same bits
twice; plain torch that sums in another order, which is as right; Strata at stage 2 and at stage 3. Ends with 1 when an
engine failed, when the two stages differ in a bit of any rank's loss, or when Strata is further from plain torch than
plain torch from itself and than --loss-tolerance.
"""

import argparse
import math
import sys

import run
import tables
from engines import ENGINES, Engine
from plain import plain_torch

TORCH, AGAIN, OTHER = "torch", "torch-again", "torch-other-order"
STAGES = ("strata-z2", "strata-z3")
COMPARED = {
    TORCH: Engine("plain torch", "torch", plain_torch, {}),
    AGAIN: Engine("plain torch, once more", "torch", plain_torch, {}),
    OTHER: Engine("plain torch, another order of sums", "torch", plain_torch, {"other_order": True}),
} | {name: ENGINES[name] for name in STAGES}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    run.add_common_arguments(parser, steps=50, loss_tolerance=2e-3)
    parser.set_defaults(warmup=0, deterministic=True)  # else a model on GPUs is apart from itself
    return parser.parse_args()


def apart(ours, theirs):
    """(largest relative distance of two engines' losses, that step from 0, that rank), of [rank][step]."""
    worst = (0.0, None, None)
    for rank, pairs in enumerate(zip(ours, theirs)):
        for step, (a, b) in enumerate(zip(*pairs)):
            distance = abs(a - b) / abs(b)
            worst = max(worst, (distance if math.isfinite(distance) else math.inf, step, rank), key=lambda w: w[0])
    return worst


def steps_alike(ours, theirs):
    """The number of first steps in which the losses of all ranks have the same bits."""
    count = 0
    for a, b in zip(zip(*ours), zip(*theirs)):
        if a != b:
            break
        count += 1
    return count


def loss_table(losses):
    """[[cell]] of {name: [rank][step]}, of which plain torch is the first."""
    lines = [["engine", "first loss", "last loss", "apart from torch", "in step", "steps with the same bits"]]
    for name, of_ranks in losses.items():
        distance, step, _ = apart(of_ranks, losses[TORCH])
        ends = [f"{sum(l[i] for l in of_ranks) / len(of_ranks):.4f}" for i in (0, -1)]
        same = f"{steps_alike(of_ranks, losses[TORCH])} of {len(of_ranks[0])}"
        lines.append([name, *ends, f"{distance:.2e}", "-" if step is None else str(step + 1), same])
    return lines


def verdict(losses, tolerance):
    """(the text at the end, whether all checks passed)."""
    noise, *_ = apart(losses[OTHER], losses[TORCH])
    ours = max(apart(losses[name], losses[TORCH])[0] for name in STAGES)
    same = losses[STAGES[0]] == losses[STAGES[1]]
    said = [f"Strata and plain torch: at most {ours:.2e} apart; plain torch and itself, in another order: {noise:.2e}"]
    said += [f"stages 2 and 3: {'the same bits in every step, on every rank' if same else 'DIFFERENT BITS'}"]
    if losses[AGAIN] != losses[TORCH]:
        said += ["plain torch in the same order: different bits, so that the model's kernels may be what differs"]
    return "\n".join(said), same and ours <= max(noise, tolerance)


def main():
    a = parse_arguments()
    result = run.run_all(a, COMPARED)
    losses = {name: row["rank_losses"] for name, row in result["engines"].items()}
    if missing := [name for name in COMPARED if name not in losses]:
        print(f"nothing to compare: {', '.join(missing)} did not run")
        return 1
    tables.show(loss_table(losses))
    said, good = verdict(losses, a.loss_tolerance)
    print(said)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
