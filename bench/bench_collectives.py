"""Shared memory against gloo: GB/s of all-gather and reduce-scatter between CPU ranks of this host.

    python bench/bench_collectives.py [--ranks 2 3] [--sizes 1 4 16 64 256] [--rounds 5] [--json FILE]

Size is that of the flat buffer in MiB: the output of an all-gather and the input of a reduce-scatter (fp32). GB/s is
size over the seconds of the slowest rank. Both sides use the same buffers again and again and are warmed up; they take
turns (shm, gloo, shm, gloo ...), and each figure is the median of its turns. Shared memory is measured by
strata_bench_comm, which also gives the limit: what all ranks reach together when each copies as much within its own
memory. gloo is torch.distributed's all_gather_into_tensor and reduce_scatter_tensor, on one thread a rank as the
others.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time

import native_programs

KINDS = ("all_gather", "reduce_scatter")


class GlooRanks:
    """Processes in a gloo group that measure on order."""

    def __init__(self, ranks):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._connections, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_gloo_rank, args=(theirs, rank, ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def measure(self, mebibytes, repetitions):
        """{all_gather_gb_per_s, reduce_scatter_gb_per_s}"""
        for connection in self._connections:
            connection.send((mebibytes, repetitions))
        by_rank = [connection.recv() for connection in self._connections]
        result = {}
        for kind in KINDS:
            slowest = [max(times) for times in zip(*(answer[kind] for answer in by_rank))]
            result[f"{kind}_gb_per_s"] = by_rank[0]["bytes"] / statistics.median(slowest) / 1e9
        return result

    def close(self):
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _gloo_rank(connection, rank, ranks, port):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    while (order := connection.recv()) is not None:
        mebibytes, repetitions = order
        numel = (mebibytes << 20) // 4 // ranks
        flat, mine = torch.ones(numel * ranks), torch.ones(numel)
        calls = {
            "all_gather": lambda: dist.all_gather_into_tensor(flat, mine),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(mine, flat),
        }
        answer = {"bytes": numel * ranks * 4}
        for kind, call in calls.items():
            answer[kind] = [_seconds(call, dist) for _ in range(3 + repetitions)][3:]
        connection.send(answer)
    dist.destroy_process_group()


def _seconds(call, dist):
    dist.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(ranks, sizes, rounds, program):
    """One row a size; all figures are medians over the rounds."""
    gloo = GlooRanks(ranks)
    rows = []
    try:
        for size in sizes:
            repetitions = max(5, min(100, 1024 // size))
            turns = []
            for _ in range(rounds):
                shm = native_programs.run_comm(program, "shm", ranks, size, repetitions)
                turns.append({"shm": shm, "gloo": gloo.measure(size, repetitions)})
            row = {"ranks": ranks, "mib": size, "copy": _median(turns, "shm", "copy")}
            for kind in KINDS:
                row[kind] = {side: _median(turns, side, kind) for side in ("shm", "gloo")}
                row[kind]["ratio"] = row[kind]["shm"] / row[kind]["gloo"]
                row[kind]["of_copy"] = row[kind]["shm"] / row["copy"]
            rows.append(row)
    finally:
        gloo.close()
    return rows


def _median(turns, side, kind):
    return statistics.median(turn[side][f"{kind}_gb_per_s"] for turn in turns)


def report(rows):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="GB/s of the flat buffer, slowest rank")
    for heading in ("ranks", "MiB", "copy"):
        table.add_column(heading, justify="right")
    for kind in KINDS:
        for heading in (f"{kind} shm", "gloo", "ratio", "of copy"):
            table.add_column(heading, justify="right")
    for row in rows:
        figures = [f"{row[kind][key]:.2f}" for kind in KINDS for key in ("shm", "gloo", "ratio", "of_copy")]
        table.add_row(str(row["ranks"]), str(row["mib"]), f"{row['copy']:.2f}", *figures)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="where the figures go, besides the table")
    arguments = parser.parse_args()
    program = native_programs.build("strata_bench_comm")
    rows = []
    for ranks in arguments.ranks:
        rows += measure(ranks, arguments.sizes, arguments.rounds, program)
    report(rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
