"""One rank of a case of bench_deferred_init.py: makes the parameter, trains a step, and prints the memory that it held.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        python bench/deferred_init_rank.py '{"library": "strata", "source": "init", "place": "device", ...}'
"""

import json
import math
import os
import sys
import time

BATCH = 4
PIECE = 8 << 20


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


def model_classes():
    """(configuration, model) of one linear layer, as transformers' models are."""
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
    """The memory that one rank holds beyond its memory at the start."""

    def __init__(self, device, ranks_of_gpu):
        import memory_use
        import torch
        from device_memory import DeviceSampler

        self._memory, self.device, self._sharing = memory_use, device, ranks_of_gpu
        if device.type == "cuda":
            some = torch.ones(1024, 1024, device=device, requires_grad=True)
            (some @ some).sum().backward()  # cuBLAS is there, in autograd's thread, too, which has its own
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
        if case["source"] == "file":
            import strata.compat.deepspeed  # before transformers, which asks once whether there is a DeepSpeed
    else:
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        import deepspeed as library

        library.init_distributed(dist_backend="gloo" if sharing > 1 else None)
        library.accelerator.get_accelerator().reset_peak_memory_stats = lambda *_, **__: None
    return library, device, sharing


def _construct(case, library, config, classes, watch):
    """(engine or None, model or None), from the case's source."""
    import torch

    (config_class, matrix_class), ours, source = classes, case["library"] == "strata", case["source"]
    folder, shapes = os.path.join(case["drive"], "model"), config_class(size=case["size"])
    began = time.perf_counter()
    engine = model = None
    if source == "load":
        engine, *_ = library.load_pretrained(folder, config, model_class=matrix_class)
        engine.train()
    elif source == "file":
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(config)  # from_pretrained looks for it
        model = matrix_class.from_pretrained(folder, dtype=torch.float32)
        del kept
        model.train()
    elif source == "init":
        with library.zero.Init(config_dict_or_path=config):
            model = matrix_class(shapes)
    else:
        model = matrix_class(shapes)
        watch.note("build", began)
        began = time.perf_counter()
        library.zero.Init(module=model, config_dict_or_path=config)
    watch.note("construct", began)
    core = engine.core if engine is not None else _core_of(model)
    if ours and core is not None:
        watch.note_ledger("construct", core)
    return engine, model


def _core_of(model):
    """The core that has the parameter since ``zero.Init``; None where it is whole."""
    return getattr(dict.__getitem__(model.matrix._parameters, "weight"), "_strata_core", None)


def run_rank(case):
    """Runs one rank of one case and prints its figures."""
    import torch

    ours = case["library"] == "strata"
    library, device, sharing = _join(case)
    classes = config_class, matrix_class = model_classes()
    config, watch = _config(case, sharing > 1), Watch(device, sharing)
    if ours:
        with torch.device("meta"):
            empty = matrix_class(config_class(size=case["size"]))
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


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
