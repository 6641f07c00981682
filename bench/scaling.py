"""The time of a step on 8 to 4,096 ranks, by arithmetic from link figures: full and grouped sharding.

    python bench/scaling.py                                    # the tables of docs/SCALING.md
    python bench/scaling.py --model qwen3-8b --nic 25 --reduce bf16 --accumulation 4
    python bench/scaling.py --check FILE...                    # beside figures of bench/step/run.py --json

docs/SCALING.md describes the model and its limits. Units: bytes and seconds; options and tables have GB/s and
milliseconds.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
RANKS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SCHEMES = ("full", "secondary", "grouped")
WEIGHT = 2  # bytes of a gathered element
STATES = 10.125  # bytes an element owned: two moments, and the remainder of the fp32 master beside its bf16 weight
GRADIENT = {"fp32": 4, "bf16": 2}  # bytes in which gradients travel
COUNTS = 0.01  # a difference between steps that is one
FORWARD = 0.25  # share of a micro-step's compute; recomputation takes the same, backward twice as much


@dataclass(frozen=True)
class Links:
    """The links between ranks. ``gather`` and ``reduce`` are (buffer's bytes, bytes/s on the bus) inside a host."""

    gather: tuple = ((16 * MIB, 211 * GB), (256 * MIB, 318 * GB), (4 * GIB, 357 * GB))
    reduce: tuple = ((16 * MIB, 192 * GB), (256 * MIB, 326 * GB), (4 * GIB, 360 * GB))
    host: int = 8  # ranks in one
    nic: float = 50 * GB  # bytes/s of a GPU's own, each way
    hop_inside: float = 2e-6  # seconds that a message takes from one GPU to the next
    hop_between: float = 8e-6  # and from host to host
    rings: bool = True  # hops in turn; else trees: as many as the logarithm of the hosts
    interference: float = 0.6  # seconds that compute loses while the bus moves bytes for a second
    memory: float = 3.6e12  # bytes/s of AdamW

    def bus(self, figures, size):
        """Bytes/s for a buffer of ``size``: between two figures on a line over its logarithm, at the largest beyond
        them; below them the seconds that do not depend on the size are those of the smallest."""
        if size >= figures[-1][0]:
            return figures[-1][1]
        smallest, rate = figures[0]
        if size <= smallest:
            fixed = smallest / rate - smallest / figures[-1][1]
            return size / (fixed + size / figures[-1][1])
        for (low, slow), (high, fast) in zip(figures, figures[1:]):
            if size <= high:
                return slow + (fast - slow) * math.log(size / low) / math.log(high / low)
        raise AssertionError("sizes are in order")

    def one(self, figures, size, ranks):
        """Seconds of one all-gather or reduce-scatter of ``size`` bytes among ``ranks``: (all, on the bus)."""
        if ranks == 1:
            return 0.0, 0.0
        on_bus = size * (ranks - 1) / ranks / self.bus(figures, size)
        hosts = -(-ranks // self.host)
        if hosts == 1:
            return on_bus, on_bus
        on_wire = size * (hosts - 1) / hosts / self.host / self.nic  # a host's GPUs receive it once together
        return max(on_bus, on_wire) + self.latency(hosts), on_bus

    def one_between(self, size, hosts):
        """Seconds of an all-gather or reduce-scatter of ``size`` bytes among as many ranks, one in each host."""
        if hosts == 1:
            return 0.0
        return size * (hosts - 1) / hosts / self.nic + self.hops(hosts) * self.hop_between

    def all_reduce_between(self, size, hosts):
        """Seconds of an all-reduce."""
        return 2 * self.one_between(size, hosts)

    def latency(self, hosts):
        """Seconds until the last rank has received from the first; a ring passes through every GPU of a host."""
        inside = (self.host - 1) * self.hop_inside
        return hosts * (self.hop_between + inside) if self.rings else self.hops(hosts) * self.hop_between + inside

    def hops(self, hosts):
        return hosts - 1 if self.rings else math.ceil(math.log2(hosts))


@dataclass(frozen=True)
class Work:
    """A rank's step. ``layers`` units of ``layer`` elements, and one of ``rest``, if any: embedding and head."""

    name: str
    layers: int
    layer: int
    rest: int
    tokens: int  # a micro-step
    floor: float  # tokens/s/GPU of forward, recomputation, backward and AdamW, nothing exchanged
    owners: int = 8  # the number of shards of which the floor's AdamW updates one
    reduce: str = "fp32"
    accumulation: int = 1

    def units(self):
        """Elements of every unit."""
        return [self.layer] * self.layers + [self.rest] * (self.rest > 0)

    def parameters(self):
        return sum(self.units())

    def compute(self, links):
        """Seconds of a micro-step without AdamW."""
        return self.tokens / self.floor - self.adam(links, self.owners)

    def adam(self, links, ranks):
        """Seconds of AdamW on one of ``ranks`` shards: reads gradient and states, writes states and weights."""
        return self.parameters() / ranks * (4 + 2 * (STATES + WEIGHT)) / links.memory

    def floor_seconds(self, links):
        return self.accumulation * self.compute(links) + self.adam(links, self.owners)


WORKS = {
    "qwen3-30b-a3b": Work("Qwen3-30B-A3B, 16 layers, 1×4096", 16, 623_120_640, 622_331_904, 4096, 17_842),
    "qwen3-8b": Work("Qwen3-8B, 2×4096", 36, 192_946_432, 1_244_663_808, 8192, 7_386),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and bytes a rank keeps of the model between steps."""

    step: float
    gather: float
    reduce: float
    exposed: float
    kept: float

    def share(self, work, links):
        """The share of the floor's speed that is reached."""
        return work.floor_seconds(links) / self.step


def cost(work, links, ranks, scheme):
    """The cost of ``work`` on ``ranks``.

    Args:
        scheme: "full": shards over all ranks. "secondary": each host holds the weights, of which every rank owns a
            part, with gradients and states, and completes its slice after the update (zero_hpz_partition_size).
            "grouped": all is sharded inside the host and replicated across hosts (mics_shard_size).
    """
    inside = min(ranks, links.host)
    near = ranks if scheme == "full" else inside
    gathers = [links.one(links.gather, WEIGHT * unit, near) for unit in work.units()]
    reduction = [links.one(links.reduce, GRADIENT[work.reduce] * unit, near) for unit in work.units()]
    hosts = 1 if scheme == "full" else -(-ranks // links.host)
    # Between hosts sums are in fp32, whatever the element type inside.
    sums = links.all_reduce_between if scheme == "grouped" else links.one_between
    between = [sums(GRADIENT["fp32"] * unit / inside, hosts) for unit in work.units()]
    completion = sum(links.one_between(WEIGHT * unit / inside, hosts) for unit in work.units())
    completion = completion if scheme == "secondary" else 0.0

    times, compute = work.accumulation, work.compute(links)
    exposed = lost = wires = 0.0
    for micro_step in range(times):
        slowed = links.interference * _on_bus(gathers)
        exposed += _exposed(_all(gathers), gathers[0][0], FORWARD * compute + slowed)
        lost += slowed
        slowed = links.interference * _on_bus(gathers + reduction)
        wire = between if scheme == "secondary" or micro_step == times - 1 else [0.0]
        wires += sum(wire)
        edge = reduction[0][0] + wire[0]  # of what is reduced last
        # NICs and NVLink work side by side: the wire begins when a first unit is reduced inside the host.
        longest = max(_all(gathers + reduction) + wire[0], reduction[0][0] + sum(wire))
        exposed += _exposed(longest, edge, (1 - FORWARD) * compute + slowed)
        lost += slowed
    shards = inside if scheme == "grouped" else ranks
    return Cost(
        step=times * compute + lost + exposed + completion + work.adam(links, shards),
        gather=times * 2 * _all(gathers) + completion,
        reduce=times * _all(reduction) + wires,
        exposed=exposed + completion,
        kept=work.parameters() * (WEIGHT / near + STATES / shards),
    )


def _all(collectives):
    return sum(seconds for seconds, _ in collectives)


def _on_bus(collectives):
    return sum(seconds for _, seconds in collectives)


def _exposed(communication, edge, compute):
    """The communication that ``compute`` does not hide: ``edge``, beside which nothing is computed, and the part of the
    rest that takes longer than ``compute``."""
    return edge + max(0.0, communication - edge - compute)


def crossover(work, links, better="grouped", than="full"):
    """The fewest ranks from which on a step of ``better`` is shorter by what counts, or None."""
    found = None
    for ranks in reversed(RANKS):
        if cost(work, links, ranks, better).step * (1 + COUNTS) > cost(work, links, ranks, than).step:
            break
        found = ranks
    return found


# --- what is printed ---


def cost_table(work, links):
    """Markdown: a line for each number of ranks."""
    lines = ["| ranks | " + " | ".join(f"{s}: ms, exposed | of floor | GiB" for s in SCHEMES) + " | shortest |"]
    lines.append("|---:|" + "---:|" * 3 * len(SCHEMES) + "---|")
    for ranks in RANKS:
        costs = {scheme: cost(work, links, ranks, scheme) for scheme in SCHEMES}
        least = min(c.step for c in costs.values())
        cells = [
            f"{c.step * 1e3:.0f}, {c.exposed * 1e3:.0f} | {c.share(work, links):.0%} | {c.kept / GIB:.2f}"
            for c in costs.values()
        ]
        shortest = [scheme for scheme, c in costs.items() if c.step <= least * (1 + COUNTS)]
        lines.append(f"| {ranks} | {' | '.join(cells)} | {', '.join(shortest)} |")
    return "\n".join(lines)


def crossover_table(links):
    """Markdown: from how many ranks on grouped sharding has the shorter step."""
    lines = ["| NIC GB/s | reduction | micro-steps | MoE, rings | MoE, trees | dense, rings | dense, trees |"]
    lines.append("|---:|---|---:|---:|---:|---:|---:|")
    for nic in (50, 25, 12.5):
        for reduce in GRADIENT:
            for accumulation in (1, 4):
                cells = []
                for work in WORKS.values():
                    work = replace(work, reduce=reduce, accumulation=accumulation)
                    for rings in (True, False):
                        cells.append(crossover(work, replace(links, nic=nic * GB, rings=rings)) or "-")
                lines.append(f"| {nic:g} | {reduce} | {accumulation} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


# Share of the floor of a resident model's step beside NCCL's collectives of the right sizes, on one host: what the
# model has to give. (work, element type of reductions, ranks, whether there are reductions, measured).
PROTOTYPES = [
    ("qwen3-30b-a3b", "fp32", 8, True, 0.65),
    ("qwen3-30b-a3b", "bf16", 8, True, 0.72),
    ("qwen3-30b-a3b", "bf16", 4, True, 0.75),
    ("qwen3-30b-a3b", "bf16", 4, False, 0.85),
    ("qwen3-8b", "fp32", 8, True, 0.91),
    ("qwen3-8b", "bf16", 8, True, 0.90),
]


def predicted(name, reduce, ranks, reductions, links):
    """The share of the floor that the model gives for blocks alone, all of it hidden."""
    work = WORKS[name]
    gather = 2 * work.layers * links.one(links.gather, WEIGHT * work.layer, ranks)[1]
    scatter = work.layers * links.one(links.reduce, GRADIENT[reduce] * work.layer, ranks)[1] if reductions else 0.0
    floor = work.floor_seconds(links)
    return floor / (floor + links.interference * (gather + scatter))


def prototype_table(links):
    """Markdown: the model beside measurements on one host."""
    lines = ["| model | ranks | beside compute | measured | by the model |", "|---|---:|---|---:|---:|"]
    for name, reduce, ranks, reductions, measured in PROTOTYPES:
        beside = f"gathers, {reduce} reductions" if reductions else "gathers"
        by_model = predicted(name, reduce, ranks, reductions, links)
        lines.append(f"| {WORKS[name].name} | {ranks} | {beside} | {measured:.0%} | {by_model:.0%} |")
    return "\n".join(lines)


def interference_table(links):
    """Markdown: what compute loses to the exchange beside it, on one host, by how the bytes are moved."""
    works = [replace(work, reduce=reduce) for work in WORKS.values() for reduce in GRADIENT]
    lines = ["| interference | " + " | ".join(f"{work.name}, {work.reduce}" for work in works) + " |"]
    lines.append("|---:|" + "---:|" * len(works))
    for interference in (0.6, 0.4, 0.25, 0.1):
        changed = replace(links, interference=interference)
        shares = [f"{cost(work, changed, links.host, 'full').share(work, changed):.0%}" for work in works]
        lines.append(f"| {interference:g} | {' | '.join(shares)} |")
    return "\n".join(lines)


def check_table(paths, links):
    """Markdown: the model beside the engines of runs of bench/step, of which it takes floor and sizes."""
    lines = ["| model | ranks | engine | ms | of floor | fp32 by the model | bf16 by the model |"]
    lines.append("|---|---:|---|---:|---:|---:|---:|")
    for path in paths:
        result = json.loads(Path(path).read_text())
        settings, floor = result["settings"], result["floor_s"]
        if settings["model"] not in WORKS or floor is None:
            sys.exit(f"{path}: wants the floor and a model of {', '.join(WORKS)}; "
                     f"found floor {floor} and {settings['model']}")
        work, ranks = WORKS[settings["model"]], settings["world"]
        tokens, layers = settings["batch"] * settings["seq"], settings["layers"] or work.layers
        work = replace(work, layers=layers, tokens=tokens, floor=tokens / floor, owners=ranks)
        shares = [cost(replace(work, reduce=r), links, ranks, "full").share(work, links) for r in GRADIENT]
        what = f"{settings['model']}, {layers} layers, {settings['batch']}×{settings['seq']}"
        for name, row in result["engines"].items():
            cells = [what, str(ranks), name, f"{row['median_s'] * 1e3:.1f}", f"{floor / row['median_s']:.0%}"]
            lines.append(f"| {' | '.join(cells + [f'{share:.0%}' for share in shares])} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(WORKS), help="one table, of this model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--nic", type=float, default=50, help="GB/s of a GPU's own between hosts")
    parser.add_argument("--reduce", choices=list(GRADIENT), default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--floor", type=float, help="tokens/s/GPU with nothing exchanged")
    parser.add_argument("--interference", type=float, default=Links.interference)
    parser.add_argument("--trees", action="store_true", help="hops between hosts by their logarithm")
    parser.add_argument("--check", metavar="FILE", nargs="+", help="figures of bench/step/run.py --json")
    a = parser.parse_args()
    links = replace(Links(), nic=a.nic * GB, rings=not a.trees, interference=a.interference)
    if a.check:
        print(check_table(a.check, links))
        return 0
    for work in [WORKS[a.model]] if a.model else WORKS.values():
        changes = {"layers": a.layers, "floor": a.floor}
        work = replace(work, reduce=a.reduce, accumulation=a.accumulation, **{k: v for k, v in changes.items() if v})
        print(f"{work.name}, {work.reduce} reduction\n\n{cost_table(work, links)}\n")
    if not a.model:
        print(f"{crossover_table(links)}\n\n{prototype_table(links)}\n\n{interference_table(links)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
