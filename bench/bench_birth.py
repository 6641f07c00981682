"""What a parameter costs from its construction to its first step: one JSON line a case, of its largest rank.

    python bench/bench_birth.py [--size 22528] [--ranks 2] [--libraries strata deepspeed] [--sources init host file] \
        [--places device host nvme] [--tile-mib 64] [--drive DIR] [--json FILE]

A module of one fp32 parameter of SIZE x SIZE, at stage 3, trained one step by AdamW. *source*: built within zero.Init,
given prebuilt on the host, or read from a file (``load_pretrained``; DeepSpeed: transformers' ``from_pretrained``).
*place*: where weights and states rest. Strata uses the parameter in tiles of --tile-mib; with 0 it is whole.
Bytes, above what the process had when its libraries were loaded, for each phase (*construct*, *initialize*, *step*:
forward, backward and step): *device*: the most in use, as the driver tells it; *device_torch*: torch's allocator's;
*ledger*: the engine's own count, by tier; *host*: anonymous and shared memory that was resident at the end;
*host_peak*: the most that was resident at all. *forecast*: what ``strata.memory_forecast`` says before there is a
model, with which ``strata plan`` counts, too. *bound*: a shard and two pieces, and four shards, three tiles and the
activations. Every case runs in fresh processes. Where there is no GPU ranks are on the CPU, and the device's
figures are the ledger's.

More ranks than GPUs share them (*ranks_of_gpu*): Strata by its peer copies, DeepSpeed by gloo. The driver's figure is
divided among them then, and Strata's weights stay on the GPU (*weights*), since those of several ranks are gathered
from elsewhere by NCCL, which wants a GPU for each.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time

LIBRARIES, SOURCES, PLACES = ("strata", "deepspeed"), ("init", "host", "file"), ("device", "host", "nvme")
BATCH = 4
PIECE = 8 << 20
PATIENCE_S = 15.0  # how long the others may go on once a rank has failed


def _ranks_of_gpu():
    """How many ranks train on each GPU; 1 on the CPU."""
    import torch

    return math.ceil(_world() / torch.cuda.device_count()) if torch.cuda.is_available() else 1


def _config(case, shared):
    place, size = case["place"], case["size"]
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_partition_stream_chunk_size": PIECE}
    adam = {"lr": 1e-3}
    ours = case["library"] == "strata"
    if place != "device":
        where = {"device": {"host": "cpu"}.get(place, place), "nvme_path": case["drive"], "pin_memory": True}
        zero["offload_optimizer"] = dict(where, buffer_count=5)
        if ours:  # DeepSpeed finds out itself
            zero["offload_optimizer"]["buffer_size"] = max(1 << 20, size * size // 8)
        if not (ours and shared):
            zero["offload_param"] = dict(where, buffer_count=5, buffer_size=max(1 << 20, size * size))
    elif not ours:
        adam |= {"torch_adam": True, "fused": True}  # its own has to be compiled first
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
              "optimizer": {"type": "AdamW", "params": adam}}  # fmt: skip
    if ours:
        config["strata"] = {"collectives": "peer"} if shared else {}
        if case["tile"]:
            config["strata"]["tiles"] = {"max_gather": case["tile"]}
    else:
        del zero["stage3_partition_stream_chunk_size"]
    return config


def _model_class():
    import torch
    import transformers

    class OneConfig(transformers.PretrainedConfig):
        model_type = "one_matrix"

        def __init__(self, size=8, **more):
            super().__init__(**more)
            self.size = size

    class OneMatrix(transformers.PreTrainedModel):
        config_class = OneConfig
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__(config)
            self.matrix = torch.nn.Linear(config.size, config.size, bias=False)
            self.post_init()

        def forward(self, x):
            return self.matrix(x).square().mean()

    transformers.AutoConfig.register(OneConfig.model_type, OneConfig)
    return OneConfig, OneMatrix


class Watch:
    """What one rank holds, above what it held at the start."""

    def __init__(self, device, ranks_of_gpu):
        import memory_use
        import torch
        from device_memory import DeviceSampler

        self._memory, self.device, self._sharing = memory_use, device, ranks_of_gpu
        if device.type == "cuda":
            torch.ones(1024, 1024, device=device) @ torch.ones(1024, 1024, device=device)  # cuBLAS is there
        self._meet()
        self._sampler = DeviceSampler(self.device, 0.002)
        self._sampler.start()
        self._device_before, self._host_before = self._sampler.used(), memory_use.resident_data()
        memory_use.forget_peak()
        self._peak_before = memory_use.peak_resident()
        self.figures = {}
        self._meet()

    def note(self, phase, began):
        """Ends a phase."""
        import torch

        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self._meet()
        self.figures |= {
            f"{phase}_seconds": round(seconds, 3),
            f"{phase}_device": (self._sampler.take() - self._device_before) // self._sharing,
            f"{phase}_device_torch": torch.cuda.max_memory_allocated() if on_gpu else 0,
            f"{phase}_host": self._memory.resident_data() - self._host_before,
            f"{phase}_host_peak": self._memory.peak_resident() - self._peak_before,
        }
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._memory.forget_peak()
        self._meet()

    def note_ledger(self, phase, core):
        """The core's peaks by tier in a phase that is over; the next one starts anew."""
        report = core.memory_report().items()
        peaks = {f"{tier}_{kind}".replace(" ", "_"): peak for (tier, kind), (_, peak) in report if peak}
        self.figures[f"{phase}_ledger"] = peaks
        core.reset_memory_peaks()

    def _meet(self):
        """Ranks of one GPU go through phases together, since its driver counts them together."""
        if self._sharing > 1:
            import torch

            torch.distributed.all_reduce(torch.zeros(1))

    def stop(self):
        self._sampler.stop()


def _join(case):
    """(the library, this rank's device, how many ranks are on it), once it is connected with the others."""
    import torch

    sharing, device = _ranks_of_gpu(), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if case["library"] == "strata":
        import strata as library

        library.init_distributed()
    else:
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        import deepspeed as library

        library.init_distributed(dist_backend="gloo" if sharing > 1 else None)
        library.accelerator.get_accelerator().reset_peak_memory_stats = lambda *_, **__: None
    return library, device, sharing


def _construct(case, library, config, classes, watch):
    """(engine or None, model or None), from the case's source."""
    import torch

    (config_class, model_class), ours, source = classes, case["library"] == "strata", case["source"]
    folder, shapes = os.path.join(case["drive"], "model"), config_class(size=case["size"])
    began = time.perf_counter()
    engine = model = None
    if source == "file" and ours:
        engine, *_ = library.load_pretrained(folder, config, model_class=model_class)
        engine.train()
    elif source == "file":
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(config)  # from_pretrained looks for it
        model = model_class.from_pretrained(folder, dtype=torch.float32)
        del kept
    elif source == "init":
        with library.zero.Init(config_dict_or_path=config):
            model = model_class(shapes)
    else:
        model = model_class(shapes)
        watch.note("build", began)
        began = time.perf_counter()
        library.zero.Init(module=model, config_dict_or_path=config)
    watch.note("construct", began)
    if ours and engine is not None:
        watch.note_ledger("construct", engine.core)
    elif ours and _world() > 1:
        watch.note_ledger("construct", dict.__getitem__(model.matrix._parameters, "weight")._strata_core)
    return engine, model


def _rank_main(case):
    """Runs one rank of one case and prints its figures."""
    import torch

    ours = case["library"] == "strata"
    library, device, sharing = _join(case)
    classes = config_class, model_class = _model_class()
    config, watch = _config(case, sharing > 1), Watch(device, sharing)
    if ours:
        with torch.device("meta"):
            empty = model_class(config_class(size=case["size"]))
        tiers = {tier: library.memory_forecast(empty, config, _world(), device=device.type, tier=tier)["total"]
                 for tier in ("device", "host")}  # fmt: skip
        watch.figures["forecast"] = tiers
    torch.manual_seed(0)
    engine, model = _construct(case, library, config, classes, watch)
    if engine is None:
        began = time.perf_counter()
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
        watch.note("initialize", began)
        if ours:
            watch.note_ledger("initialize", engine.core)
    began = time.perf_counter()
    loss = engine(torch.ones(BATCH, case["size"], device=device))
    engine.backward(loss)
    engine.step()
    watch.note("step", began)
    watch.figures["loss"] = loss.item()
    if ours:
        watch.note_ledger("step", engine.core)
    watch.stop()
    on_device = case["place"] == "device" or (ours and sharing > 1)
    watch.figures |= {"ranks_of_gpu": sharing, "weights": "device" if on_device else case["place"]}
    print("FIGURES " + json.dumps(watch.figures), flush=True)
    os._exit(0)


def _world():
    return int(os.environ["WORLD_SIZE"])


def _largest(figures):
    merged = {}
    for of_rank in figures:
        for key, value in of_rank.items():
            if isinstance(value, dict):
                value = _largest([merged.get(key, {}), value])
            merged[key] = max(merged[key], value) if key in merged and not isinstance(value, dict) else value
    return merged


def _write_file(drive, size):
    """A checkpoint of the module, in a process of its own: its memory goes with it."""
    code = (
        "import os, sys, torch; sys.path.insert(0, os.path.dirname(sys.argv[1])); import bench_birth as b;"
        "c, m = b._model_class(); m(c(size=int(sys.argv[3]))).save_pretrained(sys.argv[2])"
    )
    folder = os.path.join(drive, "model")
    subprocess.run([sys.executable, "-c", code, os.path.abspath(__file__), folder, str(size)], check=True)


def _bounds(size, ranks, tile):
    parameter, activations = 4 * size * size, 5 * 4 * BATCH * size
    return {"construct": parameter // ranks + 2 * PIECE,
            "step": 4 * parameter // ranks + 3 * (tile or parameter) + activations}  # fmt: skip


def run_case(library, source, place, arguments, drive):
    """The figures of one case, or why there are none."""
    port = str(random.randrange(20000, 30000))
    tile = int(arguments.tile_mib * (1 << 20))
    case = {"library": library, "source": source, "place": place, "size": arguments.size, "ranks": arguments.ranks,
            "parameter_bytes": 4 * arguments.size**2, "tile": tile if library == "strata" else 0}  # fmt: skip
    processes = []
    for rank in range(arguments.ranks):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
            "LOCAL_WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
        command = [sys.executable, os.path.abspath(__file__), "--rank-of", json.dumps(case | {"drive": drive})]
        logs = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
        processes.append((subprocess.Popen(command, env=environment, stdout=logs[0], stderr=logs[1]), *logs))
    _wait_for([process for process, _, _ in processes], time.monotonic() + arguments.timeout)
    told, errors = [], []
    for process, output, error in processes:
        lines = [line for line in _text(output).splitlines() if line.startswith("FIGURES ")]
        if lines:
            told.append(json.loads(lines[-1][len("FIGURES "):]))
        elif process.returncode < 0:
            errors.append(f"ended by signal {-process.returncode}: " + _text(error).strip()[-600:])
        else:
            errors.insert(0, _text(error).strip()[-600:])  # before what it had others end with
    case["bound"] = _bounds(arguments.size, arguments.ranks, tile)
    return case | ({"error": errors[0]} if errors else _largest(told))


def _text(file):
    file.seek(0)
    return file.read()


def _wait_for(processes, deadline):
    """Until all have ended; those that still run some seconds after one failed, or at the deadline, are killed."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)


def main():
    if sys.argv[1:2] == ["--rank-of"]:
        _rank_main(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=22528)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--tile-mib", type=float, default=64.0)
    parser.add_argument("--drive", default=tempfile.gettempdir())
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.drive, prefix="birth-") as drive:
        if "file" in arguments.sources:
            _write_file(drive, arguments.size)
        for place in arguments.places:
            for source in arguments.sources:
                for library in arguments.libraries:
                    line = json.dumps(run_case(library, source, place, arguments, drive))
                    print(line, flush=True)
                    if arguments.json:
                        with open(arguments.json, "a", encoding="utf-8") as file:
                            file.write(line + "\n")


if __name__ == "__main__":
    main()
