"""Strata, FSDP2, DDP and DeepSpeed side by side: seconds a step and memory, on CPU ranks of this host.

    python bench/bench_cpu.py [--stages 2 3] [--rounds 8] [--dtype fp32|bf16] [--json FILE]

All engines of a stage train the same model on the same data, each in its own processes, in turns of a few steps
(A B C A B C ...), so that other load on the machine affects all of them. The medians are compared; the losses of all
must agree. Exits with 1 if they do not, or if an engine failed.
"""

import argparse
import json
import os
import statistics
import sys

from contestants import contestants
from rank_processes import RankProcesses, is_installed, new_log_directory
from workload import Workload

# Losses after as many steps as are compared: sums in another order in fp32, another rounding of the
# weights' copies in bf16.
TOLERANCE = {"fp32": 2e-4, "bf16": 3e-2}
COMPARED_STEPS = 12


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], choices=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=8, help="turns of every engine")
    parser.add_argument("--turn", type=int, default=4, help="steps a turn; the first is not timed")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--layers", type=int, default=Workload.layers)
    parser.add_argument("--hidden", type=int, default=Workload.hidden, help="a multiple of 128")
    parser.add_argument("--micro-batch", type=int, default=Workload.micro_batch)
    parser.add_argument("--tokens", type=int, default=Workload.tokens)
    parser.add_argument("--engines", nargs="+", choices=list(contestants(2)), default=list(contestants(2)))
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    if arguments.hidden < 128 or arguments.hidden % 128 != 0:
        parser.error(f"--hidden is a multiple of 128, since heads have 64 and two share keys; got {arguments.hidden}")
    return arguments


def start(stage, arguments, workload, logs):
    """The processes of every installed engine, by name; and the names of engines that are not installed."""
    running, skipped, failed = {}, [], {}
    for name, contestant in contestants(stage).items():
        if name not in arguments.engines:
            continue
        if not is_installed(contestant.package):
            skipped.append(contestant.label)
            continue
        print(f"  starting {contestant.label}", file=sys.stderr)
        try:
            running[name] = RankProcesses(contestant, workload, arguments.ranks, logs)
        except RuntimeError as error:
            failed[contestant.label] = str(error)
    return running, skipped, failed


def compare(stage, arguments, workload, logs):
    """Runs all engines of a stage in turns; returns the input of report()."""
    running, skipped, failed = start(stage, arguments, workload, logs)

    def for_each(action):
        for name, ranks in list(running.items()):
            try:
                action(ranks)
            except RuntimeError as error:
                failed[ranks.contestant.label] = str(error)
                running.pop(name).close()

    try:
        for_each(lambda ranks: ranks.run(4, timed=False))
        for_each(lambda ranks: ranks.measure_memory())
        for turn in range(arguments.rounds):
            print(f"  turn {turn + 1} of {arguments.rounds}", file=sys.stderr)
            for_each(lambda ranks: ranks.run(arguments.turn, timed=True))
    finally:
        for ranks in running.values():
            ranks.close()
    rows = {name: row_of(ranks) for name, ranks in running.items()}
    check_losses(rows, running, workload.dtype)
    return {"stage": stage, "rows": rows, "skipped": skipped, "failed": failed}


def row_of(ranks):
    """The figures of one engine."""
    return {
        "label": ranks.contestant.label,
        "median_s": statistics.median(ranks.seconds),
        "fastest_s": min(ranks.seconds),
        "steps": len(ranks.seconds),
        "seconds_to_ready": ranks.description["seconds_to_ready"],
        "exchanges": ranks.contestant.exchanges,
        **ranks.memory,
    }


def check_losses(rows, running, dtype):
    """Writes into each row the distance of its losses from the others', and whether it is too large.

    Losses are compared with the median over the engines of every step and rank, so the check names an engine that is
    wrong.
    """
    together = [ranks for ranks in running.values() if ranks.contestant.exchanges]
    for name, ranks in running.items():
        row = rows[name]
        row["loss_first"], row["loss_last"] = ranks.losses[0][0], ranks.losses[-1][0]
        # Without an exchange only the first step is the same.
        steps = COMPARED_STEPS if ranks.contestant.exchanges else 1
        apart = 0.0
        for step in range(min(steps, len(ranks.losses))):
            for rank, loss in enumerate(ranks.losses[step]):
                middle = statistics.median(other.losses[step][rank] for other in together or [ranks])
                apart = max(apart, abs(loss - middle) / abs(middle))
        row["losses_apart"] = apart
        row["losses_agree"] = apart <= TOLERANCE[dtype]


def report(result, arguments, workload):
    """Prints one stage's table."""
    from rich.console import Console
    from rich.table import Table

    rows = result["rows"]
    table = Table(title=f"stage {result['stage']}, {workload.dtype}, {arguments.ranks} ranks")
    for heading in ("engine", "s/step", "fastest", "of plain", "ours, shm", "ours, gloo"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    for heading in ("VmHWM", "data", "over start", "ledger", "ready s", "loss", "apart"):
        table.add_column(heading, justify="right", no_wrap=True)

    def ratio(of, to):
        return f"{rows[of]['median_s'] / rows[to]['median_s']:.2f}" if of in rows and to in rows else "-"

    def mebibytes(value):
        return "-" if value is None else f"{value / (1 << 20):.0f}"

    for name, row in rows.items():
        table.add_row(
            row["label"],
            f"{row['median_s']:.3f}",
            f"{row['fastest_s']:.3f}",
            ratio(name, "plain"),
            ratio("strata-shm", name),
            ratio("strata-gloo", name),
            *(mebibytes(row[kind]) for kind in ("peak_resident", "data", "engine_data", "held")),
            f"{row['seconds_to_ready']:.1f}",
            f"{row['loss_last']:.4f}",
            f"{row['losses_apart']:.0e}{'' if row['losses_agree'] else ' !'}",
        )
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for label in result["skipped"]:
        console.print(f"skipped: {label}, which is not installed")
    for label, error in result["failed"].items():
        console.print(f"FAILED: {label}\n{error}", markup=False)


LEGEND = """s/step: median over the timed steps of the slowest rank. of plain: over plain torch's time. ours: Strata's
time over this engine's, below 1 where Strata is faster. Memory in MiB, largest rank, during steps: VmHWM counts
shared pages in full; data is anonymous and shared memory, the latter divided by its users; over start: data less
what the process had before the model was built; ledger: Strata's own account. apart: largest relative distance of
the first losses from the median engine's."""


def main():
    arguments = parse_arguments()
    workload = Workload(
        layers=arguments.layers,
        hidden=arguments.hidden,
        micro_batch=arguments.micro_batch,
        tokens=arguments.tokens,
        dtype=arguments.dtype,
    )
    logs = new_log_directory()
    print(f"what the ranks print: {logs}", file=sys.stderr)
    results = []
    for stage in arguments.stages:
        results.append(compare(stage, arguments, workload, logs))
        report(results[-1], arguments, workload)
    print(LEGEND)
    if arguments.json:
        settings = {"ranks": arguments.ranks, "cores": os.cpu_count(), "workload": vars(workload)}
        with open(arguments.json, "w") as file:
            json.dump(settings | {"stages": results}, file, indent=2)
    disagree = [row["label"] for result in results for row in result["rows"].values() if not row["losses_agree"]]
    if disagree:
        print(f"the losses do not agree (tolerance {TOLERANCE[workload.dtype]}): {', '.join(disagree)}")
    return 1 if disagree or any(result["failed"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
