"""Loss curves of the demo's model under the optimizers that users name, and whether 8-bit states change them.

    python bench/optimizer_curves.py train FOLDER [--only AdamW-0,Muon-0]   # a JSON of losses for each run, in FOLDER
    python bench/optimizer_curves.py store FOLDER --machine "2 cores" --software "torch 2.11" --date 2026-11-28
    python bench/optimizer_curves.py draw [--check]                         # docs/pictures/optimizers.svg

Each run trains the Qwen3 of examples/train_stdlib.py under examples/ds_config.json on one rank, in fp32, with another
optimizer, and the schedule over all steps. ``--width``, ``--rows`` and ``--length`` are the demo's unless given, for
which a CPU takes hours: the stored figures are those of ``--width 128 --rows 4 --length 64``. A seed gives the initial
weights and the order of batches; runs of one seed differ in the optimizer alone. Runs that FOLDER has are left out, so
several processes may share the work. The check: with the same three seeds, the mean over seeds of AdamW8bit's last 100
losses differs from AdamW's by at most the spread of AdamW's seeds (largest less least); the same of held-out losses.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path += [str(BENCH), str(BENCH.parent / "examples")]

from line_chart import Band, Line, LineChart, render  # noqa: E402

RESULTS = BENCH / "results" / "optimizers.json"
PICTURE = BENCH.parent / "docs" / "pictures" / "optimizers.svg"
LAST, POINT = 100, 50  # losses of the check; steps that a stored point averages

ADAM = {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": ADAM},
    "AdamW8bit": {"type": "AdamW8bit", "params": ADAM},
    "Muon": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                                        "momentum": 0.95, "weight_decay": 0.1}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.2}},
    "Adafactor": None,  # transformers' class, as an object
}
ADAFACTOR = {"lr": 2e-3, "weight_decay": 0.1, "scale_parameter": False, "relative_step": False}
COMPARED = ("AdamW", "AdamW8bit")  # in three seeds
RUNS = [(name, seed) for seed in range(3) for name in OPTIMIZERS if seed == 0 or name in COMPARED]


def make_model(seed, width):
    """The demo's model; with another width than its own in the same proportions."""
    import torch
    from train_stdlib import model_config
    from transformers import AutoModelForCausalLM

    config = model_config()
    heads = width // config.head_dim
    torch.manual_seed(seed)
    config.update({"hidden_size": width, "intermediate_size": width * config.intermediate_size // config.hidden_size,
                   "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 3)})
    return AutoModelForCausalLM.from_config(config)


def make_engine(name, model, rows, steps):
    """The engine under the demo's configuration, with the optimizer of this name."""
    import strata
    from transformers.optimization import Adafactor

    config = json.loads((BENCH.parent / "examples" / "ds_config.json").read_text())
    del config["bf16"], config["optimizer"]
    config |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 1}
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": steps // 10}
    if OPTIMIZERS[name] is not None:
        return strata.initialize(model=model, config=config | {"optimizer": OPTIMIZERS[name]})[0]
    return strata.initialize(model=model, config=config, optimizer=Adafactor(model.parameters(), **ADAFACTOR))[0]


def train(name, seed, width, rows, length, steps):
    """The losses of one run, in the form in which it is stored."""
    import torch
    from train_stdlib import draw_batch, evaluate, read_standard_library

    torch.set_num_threads(1)
    text, held_out = read_standard_library()
    model = make_model(seed, width)
    parameters = sum(p.numel() for p in model.parameters())
    engine = make_engine(name, model, rows, steps)
    engine.train()
    generator, losses, begin = torch.Generator().manual_seed(1 + seed), [], time.perf_counter()
    for _ in range(steps):
        batch = draw_batch(text, generator, rows, length)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 5))
    seconds = time.perf_counter() - begin
    others = draw_batch(held_out, torch.Generator().manual_seed(0), 512, length)
    held = statistics.mean(evaluate(engine, part) for part in others.split(16))
    engine.destroy()
    return {"optimizer": name, "seed": seed, "width": width, "rows": rows, "length": length, "parameters": parameters,
            "seconds": round(seconds, 1), "held_out": round(held, 5), "losses": losses}


def train_all(a):
    """Trains the runs that the folder lacks."""
    a.folder.mkdir(parents=True, exist_ok=True)
    for name, seed in RUNS:
        path = a.folder / f"{name}-{seed}.json"
        if path.exists() or (a.only and path.stem not in a.only.split(",")):
            continue
        run = train(name, seed, a.width, a.rows, a.length, a.steps)
        path.write_text(json.dumps(run) + "\n", encoding="utf-8")
        print(f"{path.stem}: last {LAST} losses {statistics.mean(run['losses'][-LAST:]):.4f}, held-out "
              f"{run['held_out']:.4f}, {run['seconds']:.0f} s", flush=True)


def stored(runs, about):
    """The figures that the picture and the page need: means of POINT steps, and the check's numbers."""
    figures = {"about": about, "steps": len(runs[0]["losses"]), "point": POINT, "runs": {},
               **{key: runs[0][key] for key in ("parameters", "width", "rows", "length")}}
    for run in runs:
        losses = run["losses"]
        figures["runs"][f"{run['optimizer']}-{run['seed']}"] = {
            "last": round(statistics.mean(losses[-LAST:]), 5), "held_out": run["held_out"],
            "points": [round(statistics.mean(losses[i : i + POINT]), 4) for i in range(0, len(losses), POINT)]}
    return figures


def compared(figures, key):
    """(mean of AdamW's seeds, their spread, mean of AdamW8bit's seeds, largest difference of one seed)."""
    wide, narrow = ([figures["runs"][f"{name}-{seed}"][key] for seed in range(3)] for name in COMPARED)
    apart = max(abs(one - other) for one, other in zip(wide, narrow))
    return statistics.mean(wide), max(wide) - min(wide), statistics.mean(narrow), apart


def report(figures):
    """Prints the check; returns whether it holds."""
    good = True
    for key, words in (("last", f"last {LAST} losses"), ("held_out", "held-out loss")):
        wide, spread, narrow, apart = compared(figures, key)
        holds = abs(narrow - wide) <= spread
        good = good and holds
        print(f"{words}: AdamW {wide:.4f} with a spread of {spread:.4f} over three seeds, AdamW8bit {narrow:.4f}; "
              f"difference of means {narrow - wide:+.4f}, of one seed at most {apart:.4f}: "
              f"{'within' if holds else 'NOT within'} the spread")
    for name, run in figures["runs"].items():
        print(f"  {name}: {run['last']:.4f}, held-out {run['held_out']:.4f}")
    return good


def draw(figures):
    """The SVG, as text."""
    steps, point = figures["steps"], figures["point"]
    at = [point * (i + 0.5) for i in range(len(next(iter(figures["runs"].values()))["points"]))]

    def points(name, seed=0):
        return figures["runs"][f"{name}-{seed}"]["points"]

    def over_seeds(name, of):
        return [of(values) for values in zip(*(points(name, seed) for seed in range(3)))]

    def ends(name):
        seeds = range(3) if name in COMPARED else [0]
        return statistics.mean(figures["runs"][f"{name}-{seed}"]["last"] for seed in seeds)

    band = Band(at, over_seeds("AdamW", min), over_seeds("AdamW", max), "adamw")
    lines = [Line(f"{name}, mean of three seeds" if name in COMPARED else name, at,
                  over_seeds(name, statistics.mean) if name in COMPARED else points(name), name.lower(),
                  f"{ends(name):.3f}")
             for name in OPTIMIZERS]
    wide, spread, narrow, _ = compared(figures, "last")
    about = figures["about"]
    caption = [
        f"The demo's Qwen3{at_width(figures['width'])} in fp32 on the source of Python's standard library; {steps:,} "
        f"steps of {figures['rows']} x {figures['length']} bytes; a point is the mean of {point} steps. "
        "The band is that of AdamW's three seeds; Muon, Lion and Adafactor have the first. "
        f"At the ends: the means of the last {LAST} losses. "
        f"AdamW {wide:.4f} with a spread of seeds of {spread:.4f}, AdamW8bit {narrow:.4f}.",
        f"Peak rates, after {steps // 10} steps of warm-up, then cosine to a tenth: {rates()}",
        f"{about['machine']}; {about['software']}; {about['date']}. Figures: bench/results/{RESULTS.name}; "
        "command: bench/optimizer_curves.py",
    ]
    highest = 3.5  # the first steps fall from ln 256
    return render(LineChart("Loss under five optimizers", "nats a byte; less is better", "optimizer steps", steps,
                            lines, band, caption, highest))


def at_width(width):
    """A caption's words for a model that is narrower than the demo's."""
    return "" if width == 384 else f" at width {width} in place of 384"


def rates():
    """The learning rate of each optimizer, in words."""
    muon, lion = OPTIMIZERS["Muon"]["params"], OPTIMIZERS["Lion"]["params"]
    return (f"AdamW and AdamW8bit {ADAM['lr']:g}, Muon {muon['lr']:g} with AdamW at {muon['adam_lr']:g} for "
            f"embedding and norms, Lion {lion['lr']:g}, Adafactor {ADAFACTOR['lr']:g}. Weight decay "
            f"{ADAM['weight_decay']:g}, Lion's {lion['weight_decay']:g}.")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--only", help="names of runs, such as AdamW-0,Muon-0")
    training.add_argument("--width", type=int, default=384, help="of the model; a multiple of 64")
    training.add_argument("--rows", type=int, default=8, help="of a step")
    training.add_argument("--length", type=int, default=128, help="bytes of a row")
    training.add_argument("--steps", type=int, default=2000)
    storing = commands.add_parser("store")
    for key in ("machine", "software", "date"):
        storing.add_argument(f"--{key}", required=True, help="as the caption says it")
    for with_folder in (training, storing):
        with_folder.add_argument("folder", type=Path)
    commands.add_parser("draw").add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    return parser.parse_args()


def main():
    a = parse_arguments()
    if a.command == "train":
        train_all(a)
        return 0
    if a.command == "store":
        runs = [json.loads((a.folder / f"{name}-{seed}.json").read_text()) for name, seed in RUNS]
        about = {key: getattr(a, key) for key in ("machine", "software", "date")}
        RESULTS.write_text(json.dumps(stored(runs, about), indent=None).replace('{"last"', '\n{"last"') + "\n")
    figures = json.loads(RESULTS.read_text())
    picture, check = draw(figures), a.command == "draw" and a.check
    if check and PICTURE.read_text() != picture:
        print(f"{PICTURE.name}: out of date")
        return 1
    if not check:
        PICTURE.write_text(picture)
    return 0 if report(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
