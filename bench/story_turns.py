"""Turns of the stories: an uncounted one of each engine with a tiny model, then the counted ones, one after the other.
An engine that fails has no more turns; what the others did, and what it did before, is kept."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import make_model
from story_jobs import Failed, has_deepspeed, strata_program, torchrun

ENGINES = ["strata", "deepspeed"]


def command_of(engine, script, world):
    """[str]: how users start the script."""
    if engine == "strata":
        return [strata_program(), "run", f"--num_gpus={world}", script]
    return [*torchrun(world), script]


def installed(engines, world):
    """Those of the engines that are here; of the others it is printed.

    Raises:
        SystemExit: the program ``strata`` is nowhere.
    """
    found = [e for e in engines if e != "deepspeed" or has_deepspeed()]
    for engine in engines:
        if engine not in found:
            print(f"skipped: {engine} is not installed")
    try:
        for engine in found:
            command_of(engine, "", world)
    except FileNotFoundError as error:  # before a checkpoint is written
        sys.exit(str(error))
    return found


def prepared_checkpoint(folder, name, layers, device, unfused=False):
    """``folder``, in which there is a checkpoint; written where there is none."""
    if not sorted(folder.glob("*.safetensors")):
        began = time.monotonic()
        config = make_model.make_config(name, layers)
        count, size = make_model.write_checkpoint(config, folder, unfused=unfused, device=device)
        seconds = time.monotonic() - began
        print(f"wrote {name} of {config.num_hidden_layers} layers: {count} tensors, {size / 1e9:.2f} GB in "
              f"{seconds:.1f} s", flush=True)  # fmt: skip
    return folder


class Turns:
    """The turns of engines.

    Args:
        engines: [str]; their order is that of the turns.

    Attributes:
        done: {engine: [figures of a turn]}.
        errors: {engine: its error}, of engines that have failed.
        told: {engine: what the job that failed had told}.
    """

    def __init__(self, engines):
        self.done, self.errors, self.told = {engine: [] for engine in engines}, {}, {}

    def warm_up(self, run):
        """The uncounted turns, all at once: they compile modules, and DeepSpeed's operators, for minutes at times.

        Args:
            run: of an engine; its value is not used.
        """

        def timed(engine):
            began = time.monotonic()
            self._guarded(engine, run)
            print(f"uncounted turn of {engine}: {time.monotonic() - began:.1f} s", flush=True)

        with ThreadPoolExecutor(max(1, len(self.done))) as pool:
            list(pool.map(timed, self.done))

    def take(self, run, after=None):
        """A turn of every engine.

        Args:
            run: of an engine: its figures.
            after: is called after each.
        """
        for engine in self.done:
            figures = self._guarded(engine, run)
            if figures is not None:
                self.done[engine].append(figures)
            if after:
                after()

    def account(self):
        """All of it, for a file."""
        return {"turns": self.done, "errors": self.errors, "told": self.told}

    def figures(self):
        """(engine, figures) of every turn."""
        return [(engine, turn) for engine, done in self.done.items() for turn in done]

    def _guarded(self, engine, run):
        if engine in self.errors:
            return None
        try:
            return run(engine)
        except Failed as error:
            self.errors[engine], self.told[engine] = str(error), error.told
            print(f"FAILED: {engine}: {error}", flush=True)
            return None
