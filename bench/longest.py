"""The longest row that trains, of Strata, of DeepSpeed, and of settings of either; or tokens/s at given lengths.

    python bench/longest.py --shape qwen3-0.6b [--contestants strata deepspeed-alst] [--json FILE]
    python bench/longest.py --shape qwen3-0.6b --lengths 16384 65536 131072
    python bench/longest.py --shape qwen3-8b --offload states --world 2 --sp 2

Jobs start as users start them: by ``strata run`` with Strata in DeepSpeed's place, by torchrun with DeepSpeed itself.
``longest_script.py`` is a Trainer script with gradient checkpointing that takes 2 steps of one row. Each try is a fresh
job. Contestants take turns: each doubles its row from --from until one does not train, then halves the gap down to
--granule tokens. A try that ends for lack of memory, or by --timeout, is a result; any other failure is an error, after
which its contestant has no more tries.

Before, it prints the longest rows that ``strata plan`` expects of Strata; after, their ratio to the measured ones,
which must be within 10 % on a GPU. Contestants' losses at the same length must agree. Seconds are those of the last
step on the slowest rank. Memory: torch's own peaks, all that is in use on the fullest device, and of the host.

Attention's time grows with the square of the row: a step of a million tokens of Qwen3-0.6B takes half an hour. --window
N bounds it and does not change the memory; --layers cuts the model. --within and --resume divide a search among
commands that have a time limit.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make_model
from compiled_modules import environment
from story_jobs import GIB, Failed, environment_of, run_job, strata_program
from story_turns import command_of, installed
from tables import show

SCRIPT = Path(__file__).with_name("longest_script.py")
RELATIVE = 2e-2  # tolerance of a loss in bf16: each engine adds gradients in its own order
FORECAST = 0.1  # tolerance of a forecast
LEAST_TRY_S = 20  # less time than this is no try
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}

# ``strata``: the section of the JSON. ``pieces``: the script's --pieces.
Contestant = namedtuple("Contestant", "label engine strata pieces", defaults=(None, False))
CONTESTANTS = {
    "strata": Contestant("strata", "strata"),
    "strata-host": Contestant("strata, inputs on the host", "strata", {"activations": {"device": "cpu"}}),
    "strata-plain": Contestant("strata, plain", "strata",
                               {"loss": "plain", "mlp_piece": 0, "activations": {"device": "device"}}),
    "deepspeed": Contestant("deepspeed", "deepspeed"),
    "deepspeed-alst": Contestant("deepspeed, ALST", "deepspeed", None, True),
}  # fmt: skip
ENDS = {"device": "out of memory of the device", "host": "out of memory of the host", "timeout": "timeout"}


def config_of(contestant, a):
    """The JSON."""
    zero = {"stage": a.stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if a.stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    if a.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if a.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    adam = dict(AUTO)
    if contestant.engine == "deepspeed" and a.offload == "none":
        adam |= {"torch_adam": True, "fused": True}  # its own has to be compiled first
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    return config | ({"strata": contestant.strata} if contestant.strata else {})


def run_once(contestant, tokens, a, base, folder, limit_s):
    """{"tokens", "outcome": "trained", a key of ENDS, or "error", "said", "seconds"}, and figures if it trained."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longest-out-") as out, HostMemory() as host:
        config = Path(out, "ds.json")
        config.write_text(json.dumps(config_of(contestant, a)))
        command = [*command_of(contestant.engine, SCRIPT, a.world), folder, out, "--deepspeed", config]
        command += ["--length", tokens, "--steps", a.steps, "--stage", a.stage, "--sp", a.sp, "--window", a.window]
        command += ["--pieces"] * contestant.pieces + ["--cpu"] * (a.device == "cpu")
        command += ["--positions"] * (contestant.engine == "deepspeed" and a.sp > 1)  # it asks for them
        command += ["--fail-above", a.fail_above] * bool(a.fail_above)
        found = {"tokens": tokens, "outcome": "trained", "said": ""}
        try:
            outcome = run_job(command, environment_of(a.device, base), 0, limit_s)
            found |= figures_of(outcome.told, a)
            found["host"] = max(host.taken(), outcome.memory.together)
        except Failed as error:
            found["outcome"], found["said"] = end_of(error)
            found["told"], found["output"] = error.told, str(error)[-3000:]
    return found | {"seconds": round(time.monotonic() - began, 1)}


def figures_of(told, a):
    """{figure: value} of what ranks have told.

    Raises:
        Failed: they have not told of every step, or a step did something else than it should.
    """
    steps = [line for line in told if "step" in line]
    logged = [line for line in told if "logged" in line]
    if len(steps) != a.steps * a.world or [line["logged"] for line in logged] != list(range(1, a.steps + 1)):
        raise Failed(f"not every rank told of {a.steps} steps", told)
    if not all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in logged):
        raise Failed(f"these steps train nothing: {logged}", told)
    last = [line["seconds"] for line in steps if line["step"] == a.steps]
    peaks = {name: max(line.get(name, 0) for line in steps) for name in ("allocated", "reserved", "device")}
    ready = max(line["ready"] for line in told if "ready" in line)
    return peaks | {"step": max(last), "ready": ready, "losses": [line["loss"] for line in logged],
                    "norms": [line["grad_norm"] for line in logged]}  # fmt: skip


def end_of(error):
    """(outcome, a line that says why) of a Failed."""
    text = str(error)
    ends = [line for line in error.told if "ended" in line]
    for kind in ("device", "host"):
        if found := [line["message"] for line in ends if line["ended"] == kind]:
            return kind, found[0]
    if text.startswith("it did not end within"):
        return "timeout", text.splitlines()[0]
    if re.search(r"SIGKILL|signal 9|exitcode\s*:\s*-9|ended with (-9|137)\b", text, re.IGNORECASE):
        return "host", "the kernel ended a rank (SIGKILL)"  # which asked to be the first that it ends
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line["message"] for line in ends] or [line for line in lines if "rror" in line][-1:] or lines[-1:]
    return "error", said[0]


class HostMemory:
    """The most that the available memory of this host falls while the context is open: pinned memory counts, too."""

    INTERVAL_S = 0.1

    def __enter__(self):
        self._before = self._least = self._available()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, value, traceback):
        self._end.set()
        self._thread.join()

    def taken(self):
        """Bytes, up to now."""
        return max(0, self._before - self._least)

    def _watch(self):
        while not self._end.wait(self.INTERVAL_S):
            self._least = min(self._least, self._available())

    def _available(self):
        return memory_of_host("MemAvailable")


def memory_of_host(name):
    """Bytes of a line of /proc/meminfo."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1])


def next_length(tries, a):
    """int: the row of the next try of a contestant; None: there is none.

    Args:
        tries: its results so far.
    """
    if any(one["outcome"] == "error" for one in tries):
        return None
    trained = [one["tokens"] for one in tries if one["outcome"] == "trained"]
    failed = [one["tokens"] for one in tries if one["outcome"] != "trained"]
    if a.lengths:
        left = (tokens for tokens in sorted(a.lengths) if tokens not in trained)
        tokens = next(left, None)
        return tokens if tokens is not None and tokens < min(failed, default=math.inf) else None
    if len(tries) >= a.tries:
        return None
    if not tries:
        return a.first
    if not failed:
        return min(2 * max(trained), a.last) if max(trained) < a.last else None
    low, high = max(trained, default=0), min(failed)
    middle = (low + high) // 2 // a.granule * a.granule
    return middle if low < middle < high else None


def search(a, folder, base, tries, write):
    """Adds the results of all contestants to ``tries``, {key: [result]}, in turns."""
    ends_at = time.monotonic() + a.within
    waits = dict.fromkeys(tries)
    while waits:
        for key in list(waits):
            tokens, left = next_length(tries[key], a), ends_at - time.monotonic()
            if tokens is None:
                del waits[key]
                continue
            # A longer row takes longer, by a factor between that of the rows and its square.
            expected = [one["seconds"] * max(1, tokens / one["tokens"]) for one in tries[key][-1:]]
            if left < max(LEAST_TRY_S, *expected, 0):
                print(f"{CONTESTANTS[key].label}: no time is left for {tokens:,} tokens", flush=True)
                del waits[key]
                continue
            found = run_once(CONTESTANTS[key], tokens, a, base, folder, min(a.timeout, left))
            if found["outcome"] == "timeout" and left < a.timeout:  # says nothing about the row
                print(f"{CONTESTANTS[key].label}: {tokens:,} tokens did not end in the time that was left", flush=True)
                del waits[key]
                continue
            tries[key].append(found)
            print_try(CONTESTANTS[key], found)
            write()


def print_try(contestant, found):
    how = f"{found['step']:.2f} s a step" if found["outcome"] == "trained" else found["said"][:150]
    spent = f"{found['seconds']:.0f} s in all"
    print(f"{contestant.label}: {found['tokens']:,} tokens: {found['outcome']}, {how} ({spent})", flush=True)
    if found["outcome"] == "error":
        print(found["output"], flush=True)


def warm_up(keys, a, base, scratch):
    """A try of each engine with a tiny model, uncounted, all at once: they compile modules, and DeepSpeed's operators,
    for minutes at times."""
    toy = scratch / "toy"
    make_model.make_config("tiny").save_pretrained(toy)
    settings = argparse.Namespace(**(vars(a) | {"fail_above": 0}))
    first = {CONTESTANTS[key].engine: key for key in reversed(keys)}
    with ThreadPoolExecutor(len(first)) as pool:
        tries = [pool.submit(run_once, CONTESTANTS[key], 64 * a.world, settings, base, toy, a.timeout)
                 for key in first.values()]  # fmt: skip
    for engine, one in zip(first, tries):
        found = one.result()
        said = f"{found['outcome']}, {found['seconds']:.1f} s {found['said'][:150]}"
        print(f"uncounted try of {engine}: {said}", flush=True)


def device_memory(a):
    """Bytes of a device; None: there is none. A process of its own asks, for a process that uses a GPU takes memory."""
    if a.device_memory or a.device == "cpu":
        return a.device_memory
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def forecast(key, a, folder, scratch):
    """The longest row by ``strata plan``: {"tokens", "first", ...}; None: it does not know."""
    if a.device_memory is None or CONTESTANTS[key].engine != "strata":
        return None
    config = config_of(CONTESTANTS[key], a)
    if a.sp > 1:
        config["strata"] = config.get("strata", {}) | {"sequence_parallel": {"size": a.sp}}
    path = scratch / f"plan-{key}.json"
    path.write_text(json.dumps(config))
    command = [strata_program(), "plan", "--json", "--model", folder / "config.json", "--config", path]
    command += ["--world", a.world, "--ranks-per-host", a.world, "--checkpointing"]
    command += ["--device-memory", a.device_memory, "--host-memory", memory_of_host("MemAvailable")]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    try:
        longest = json.loads(done.stdout)["longest"]
    except (ValueError, KeyError):
        longest = None
    if not longest:
        print(f"strata plan does not say: {done.stderr.strip()[-300:]}")
        return None
    named = ("first", "engine", "kept", "attention", "mlp", "loss", "host")
    return {"tokens": longest["seq"]} | {name: longest.get(name) for name in named}  # "seq": of a row that ranks share


def print_forecasts(forecasts):
    for key, of in forecasts.items():
        label, tokens = CONTESTANTS[key].label, of["tokens"]
        print(f"strata plan expects of {label}: {tokens:,} tokens, then {of['first']} has no room", flush=True)


def longest_of(tries):
    """(result of the longest row that trained or None, that of the shortest that did not or None)."""
    trained = [one for one in tries if one["outcome"] == "trained"]
    failed = [one for one in tries if one["outcome"] != "trained"]
    return (max(trained, key=lambda one: one["tokens"], default=None),
            min(failed, key=lambda one: one["tokens"], default=None))  # fmt: skip


def print_table(tries, a):
    rows = [["", "tokens", "step s", "tokens/s", "allocated", "reserved", "device", "host", "ready s", "the next one"]]
    for key, of in tries.items():
        longest, failed = longest_of(of)
        ended = "" if failed is None else f"{failed['tokens']:,}: {ENDS.get(failed['outcome'], failed['said'])}"[:90]
        shown = [one for one in of if one["outcome"] == "trained"] if a.lengths else [longest]
        for one in sorted(filter(None, shown), key=lambda one: one["tokens"]):
            speed = one["tokens"] * (a.world // a.sp) / one["step"]
            gibs = [f"{one[name] / GIB:.2f}" for name in ("allocated", "reserved", "device", "host")]
            rows.append([CONTESTANTS[key].label, f"{one['tokens']:,}", f"{one['step']:.2f}", f"{speed:,.0f}", *gibs,
                         f"{one['ready']:.1f}", ended if one is longest else ""])  # fmt: skip
        if longest is None:
            rows.append([CONTESTANTS[key].label, "none", *[""] * 7, ended])
    show(rows)
    print("The last step, of the slowest rank. Memory in GiB, at the most of the job: torch's allocator on one device; "
          "all in use on the fullest device; the host's, by its available memory or by processes.", flush=True)


def forecasts_hold(forecasts, tries):
    """Prints measured over expected rows; whether those that memory ended lie within FORECAST."""
    good = True
    for key, of in forecasts.items():
        longest, failed = longest_of(tries[key])
        if longest is None:
            continue
        ratio = longest["tokens"] / of["tokens"]
        if failed is None or failed["outcome"] not in ("device", "host"):
            print(f"{CONTESTANTS[key].label}: {longest['tokens']:,} tokens train, {ratio:.3f} of the forecast; "
                  "more may, for memory did not end the search")  # fmt: skip
            continue
        least, most = ratio, failed["tokens"] / of["tokens"]
        holds = least < 1 + FORECAST and most > 1 - FORECAST
        print(f"{CONTESTANTS[key].label}: measured {longest['tokens']:,}, expected {of['tokens']:,} tokens: {ratio:.3f}"
              + ("" if holds else f"; FAILED: not within {FORECAST:.0%}"))  # fmt: skip
        good = good and holds
    return good


def losses_agree(tries):
    """Prints how far losses and norms at the same length lie apart; whether losses no farther than rounding."""
    by_length = {}
    for key, of in tries.items():
        for one in of:
            if one["outcome"] == "trained":
                by_length.setdefault(one["tokens"], []).append((key, one))
    good = True
    for tokens, ran in sorted(by_length.items()):
        (first, of), *others = ran
        for key, one in others:
            loss, norm = (max(abs(x / y - 1) for x, y in zip(one[name], of[name])) for name in ("losses", "norms"))
            agrees = loss < RELATIVE
            good = good and agrees
            print(f"{tokens:,} tokens, {CONTESTANTS[key].label} and {CONTESTANTS[first].label}: losses differ by "
                  f"{loss:.1e}, norms by {norm:.1e}" + ("" if agrees else "; FAILED"), flush=True)  # fmt: skip
    return good


def earlier(a, settings):
    """{key: [result]} of --json's file, if --resume is given.

    Raises:
        SystemExit: that file has results of other settings.
    """
    if not (a.resume and a.json and a.json.exists()):
        return {}
    told = json.loads(a.json.read_text())
    if told["settings"] != settings:
        sys.exit(f"{a.json} has results of other settings: {told['settings']}; here they are {settings}")
    return told["tries"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(make_model.SHAPES), help="of make_model.py")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--offload", choices=["none", "states", "all"], default="none", help="to the host's memory")
    parser.add_argument("--world", type=int, default=1, help="ranks; one GPU each")
    parser.add_argument("--sp", type=int, default=1, help="ranks that share a row")
    parser.add_argument("--lengths", nargs="+", type=int, help="rows to run, instead of a search")
    parser.add_argument("--from", dest="first", type=int, default=16384, help="tokens of the first try")
    parser.add_argument("--to", dest="last", type=int, default=1 << 22, help="tokens at the most")
    parser.add_argument("--granule", type=int, default=8192, help="tokens; rows are multiples of it")
    parser.add_argument("--tries", type=int, default=12, help="of a contestant at the most")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--window", type=int, default=0, help="tokens that a token attends to; 0: all")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a try may take")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all tries; then the table comes")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--device-memory", type=int, help="bytes, for the forecast; default: the device's")
    parser.add_argument("--allocator", help="PYTORCH_CUDA_ALLOC_CONF of all contestants")
    parser.add_argument("--as-installed", action="store_true", help="compile nothing beforehand")
    parser.add_argument("--fail-above", type=int, default=0, help="longer rows end as if memory were out: for tests")
    parser.add_argument("--json", type=Path, help="where the results go, after every try")
    parser.add_argument("--resume", action="store_true", help="keep the results that --json has")
    a = parser.parse_args()
    if a.world % a.sp or any(tokens % a.sp for tokens in [a.first, a.granule, *(a.lengths or [])]):
        parser.error("--sp divides --world and rows")
    if a.device is None:
        import torch

        a.device = "cuda" if torch.cuda.is_available() else "cpu"
    return a


def main():
    a = arguments()
    engines = installed(dict.fromkeys(CONTESTANTS[key].engine for key in a.contestants), a.world)
    keys = [key for key in a.contestants if CONTESTANTS[key].engine in engines]
    shared = ("shape", "layers", "stage", "offload", "world", "sp", "steps", "window", "allocator", "device")
    settings = {name: getattr(a, name) for name in shared}
    tries = {key: earlier(a, settings).get(key, []) for key in keys}
    with tempfile.TemporaryDirectory(prefix="longest-") as scratch, environment(a.as_installed) as base:
        scratch, folder = Path(scratch), Path(scratch, "model")
        make_model.make_config(a.shape, a.layers).save_pretrained(folder)
        a.device_memory = device_memory(a)
        base |= {"PYTORCH_CUDA_ALLOC_CONF": a.allocator} if a.allocator else {}
        forecasts = {key: of for key in keys if (of := forecast(key, a, folder, scratch))}
        print_forecasts(forecasts)
        if not a.as_installed:
            warm_up(keys, a, base, scratch)

        def write():
            if a.json:
                told = {"settings": settings, "arguments": vars(a), "forecasts": forecasts, "tries": tries}
                a.json.write_text(json.dumps(told, indent=1, default=str))

        search(a, folder, base, tries, write)
    print_table(tries, a)
    good = [losses_agree(tries)]
    if not a.lengths:
        good.append(forecasts_hold(forecasts, tries) or a.device == "cpu")
    errors = [one for of in tries.values() for one in of if one["outcome"] == "error"]
    return 0 if all(good) and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
