"""What a parameter costs from its construction to its first step: one JSON line a case, of its largest rank.

    python bench/bench_birth.py [--size 22528] [--ranks 2] [--libraries strata deepspeed] [--sources init host file] \
        [--places device host nvme] [--drive DIR] [--json FILE]

A module of one fp32 parameter of SIZE x SIZE, at stage 3, trained one step by AdamW. *source*: built within zero.Init,
given prebuilt on the host, or read from a file (``load_pretrained``; DeepSpeed: transformers' ``from_pretrained``).
*place*: where weights and states rest. Bytes, above what the process had when its libraries were loaded:
*construct*, *initialize*, *step* (forward, backward and step): the most on the device, as its driver tells it, and as
torch's allocator does (what Strata's engine has is not in it); *host_...*: anonymous and shared memory that was
resident at the end, and the most that was resident at all; *ledger*: the engine's own count, by tier. Every case runs
in fresh processes. Where there is no GPU ranks are on the CPU, and the device's figures are the ledger's.
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


def _config(place, drive, size):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if place != "device":
        where = {"device": {"host": "cpu"}.get(place, place), "nvme_path": drive, "pin_memory": True}
        zero["offload_optimizer"] = dict(where, buffer_count=5, buffer_size=max(1 << 20, size * size // 8))
        zero["offload_param"] = dict(where, buffer_count=5, buffer_size=max(1 << 20, size * size))
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


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

    def __init__(self, rank):
        import memory_use
        import torch
        from device_memory import DeviceSampler

        self._memory = memory_use
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.ones(1024, 1024, device=self.device) @ torch.ones(1024, 1024, device=self.device)  # cuBLAS is there
        self._sampler = DeviceSampler(self.device, 0.002)
        self._sampler.start()
        self._device_before, self._host_before = self._sampler.used(), memory_use.resident_data()
        memory_use.forget_peak()
        self._peak_before = memory_use.peak_resident()
        self.figures = {}

    def note(self, phase, began):
        """Ends a phase."""
        import torch

        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        self.figures |= {
            f"{phase}_seconds": round(time.perf_counter() - began, 3),
            f"{phase}_device": self._sampler.take() - self._device_before,
            f"{phase}_device_torch": torch.cuda.max_memory_allocated() if on_gpu else 0,
            f"{phase}_host": self._memory.resident_data() - self._host_before,
            f"{phase}_host_peak": self._memory.peak_resident() - self._peak_before,
        }
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._memory.forget_peak()

    def stop(self):
        self._sampler.stop()


def _ledger(report):
    return {f"{tier}_{kind}".replace(" ", "_"): peak for (tier, kind), (_, peak) in report.items() if peak}


def _rank_main(library, source, place, size, drive):
    """Runs one rank of one case and prints its figures."""
    rank = int(os.environ["RANK"])
    import torch

    if library == "strata":
        import strata as engine_of
    else:
        import deepspeed as engine_of

        engine_of.init_distributed()
        engine_of.accelerator.get_accelerator().reset_peak_memory_stats = lambda *_, **__: None
    config_class, model_class = _model_class()
    config, watch = _config(place, drive, size), Watch(rank)
    torch.manual_seed(0)
    shapes = config_class(size=size)
    if library == "strata":
        engine_of.init_distributed()
    began = time.perf_counter()
    engine = model = None
    if source == "file" and library == "strata":
        engine, *_ = engine_of.load_pretrained(os.path.join(drive, "model"), config, model_class=model_class)
        engine.train()
    elif source == "file":
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(config)  # from_pretrained looks for it
        model = model_class.from_pretrained(os.path.join(drive, "model"), dtype=torch.float32)
        del kept
    elif source == "init":
        with engine_of.zero.Init(config_dict_or_path=config):
            model = model_class(shapes)
    else:
        model = model_class(shapes)
        watch.note("build", began)
        began = time.perf_counter()
        engine_of.zero.Init(module=model, config_dict_or_path=config)
    watch.note("construct", began)
    if model is not None and library == "strata":
        core = next(p._strata_core for p in dict.values(model.matrix._parameters)) if _world() > 1 else None
        watch.figures["construct_ledger"] = {} if core is None else _ledger(core.memory_report())
        del core
    if engine is None:
        began = time.perf_counter()
        engine, *_ = engine_of.initialize(model=model, model_parameters=model.parameters(), config=config)
        watch.note("initialize", began)
    began = time.perf_counter()
    loss = engine(torch.ones(BATCH, size, device=watch.device))
    engine.backward(loss)
    engine.step()
    watch.note("step", began)
    if library == "strata":
        watch.figures["ledger"] = _ledger(engine.memory_report())
        watch.figures["forecast"] = {tier: engine.memory_forecast(tier)["total"] for tier in ("device", "host")} \
            if hasattr(engine, "memory_forecast") else {}
    watch.stop()
    print("FIGURES " + json.dumps(watch.figures), flush=True)
    os._exit(0)


def _world():
    return int(os.environ["WORLD_SIZE"])


def _largest(figures):
    merged = {}
    for of_rank in figures:
        for key, value in of_rank.items():
            merged[key] = _largest([merged.get(key, {}), value]) if isinstance(value, dict) else max(
                merged.get(key, -math.inf), value)
    return merged


def _write_file(drive, size):
    """A checkpoint of the module, in a process of its own: its memory goes with it."""
    code = (
        "import os, sys, torch; sys.path.insert(0, os.path.dirname(sys.argv[1])); import bench_birth as b;"
        "c, m = b._model_class(); m(c(size=int(sys.argv[3]))).save_pretrained(sys.argv[2])"
    )
    folder = os.path.join(drive, "model")
    subprocess.run([sys.executable, "-c", code, os.path.abspath(__file__), folder, str(size)], check=True)


def run_case(library, source, place, arguments, drive):
    """The figures of one case, or why there are none."""
    port = str(random.randrange(20000, 30000))
    case = {"library": library, "source": source, "place": place, "size": arguments.size, "ranks": arguments.ranks,
            "parameter_bytes": 4 * arguments.size**2}
    processes = []
    for rank in range(arguments.ranks):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
            "LOCAL_WORLD_SIZE": str(arguments.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }
        command = [sys.executable, os.path.abspath(__file__), "--rank-of", library, source, place, str(arguments.size),
                   drive]
        processes.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE))
    told, errors = [], []
    for process in processes:
        try:
            output, error = process.communicate(timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, error = process.communicate()
            error += f"\ntook longer than {arguments.timeout} s"
        lines = [line for line in output.splitlines() if line.startswith("FIGURES ")]
        if lines:
            told.append(json.loads(lines[-1][len("FIGURES "):]))
        else:
            errors.append(error.strip()[-600:])
    return case | ({"error": errors[0]} if errors else _largest(told))


def main():
    if sys.argv[1:2] == ["--rank-of"]:
        library, source, place, size, drive = sys.argv[2:]
        _rank_main(library, source, place, int(size), drive)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=22528)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
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
