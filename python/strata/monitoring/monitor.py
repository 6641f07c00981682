"""``engine.monitor``: writes metrics to the monitors that the configuration names.

Rank 0 has a writer for each: TensorBoard, Weights & Biases, CSV files, Comet. A writer takes its section of the
configuration as a dict, opens when it is made, and has ``write(events)`` and ``close()``. An event is (name, float,
samples so far)."""

import csv
import json
import os
import sys
from importlib.util import find_spec
from itertools import groupby

from .. import _C
from ..views import logger


def require_packages(config):
    """Raises ConfigError for the first monitor that a _C.Config switches on and whose package is not installed."""
    for section in enabled_monitors(config):
        package = WRITERS[section].package
        if package is not None and sys.modules.get(package) is None and find_spec(package) is None:
            raise _C.ConfigError(
                f"{section}.enabled: wanted the package {package}, which writes these metrics and is not installed; "
                f"install it (pip install {package.replace('_', '-')}), or write false; found true")


class _Writer:
    package = None  # that a writer needs

    def close(self):
        """Does nothing: no file is open between calls, or the package ends its run with the program."""


class CsvWriter(_Writer):
    """Writes one file for each metric, in ``output_path``/``job_name``: "Train_Samples_lr.csv" with the columns "step"
    (samples so far) and "lr". It appends to an earlier run's files."""

    def __init__(self, section):
        self._folder = os.path.join(section["output_path"], section["job_name"])
        os.makedirs(self._folder, exist_ok=True)

    def write(self, events):
        for name, value, samples in events:
            path = os.path.join(self._folder, name.replace("/", "_").replace(" ", "_") + ".csv")
            with open(path, "a", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(["step", name.split("/")[-1]])
                rows.writerow([samples, value])


class TensorBoardWriter(_Writer):
    """An event file in ``output_path``/``job_name``."""

    package = "tensorboard"

    def __init__(self, section):
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(section["output_path"], section["job_name"])
        self.summary_writer = SummaryWriter(log_dir=folder)

    def write(self, events):
        for name, value, samples in events:
            self.summary_writer.add_scalar(name, value, samples)
        self.summary_writer.flush()

    def close(self):
        self.summary_writer.close()


class WandbWriter(_Writer):
    """Writes to a run of ``project``, ``group`` and ``team``. In a run that the script itself has begun, wandb's steps
    belong to the script, so the samples are a metric of their own: "Train/Samples"."""

    package = "wandb"

    def __init__(self, section):
        import wandb

        self._wandb = wandb
        self._shares = wandb.run is not None
        if not self._shares:
            wandb.init(project=section["project"], group=section["group"], entity=section["team"])

    def write(self, events):
        for samples, at_once in groupby(events, key=lambda event: event[2]):
            values = {name: value for name, value, _ in at_once}
            if self._shares:
                self._wandb.log({**values, "Train/Samples": samples})
            else:
                self._wandb.log(values, step=samples)


class CometWriter(_Writer):
    """Writes to an experiment, each metric once every ``samples_log_interval`` samples."""

    package = "comet_ml"

    def __init__(self, section):
        import comet_ml

        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self.experiment = comet_ml.start(**{name: section[name] for name in names})
        if section["experiment_name"] is not None:
            self.experiment.set_name(section["experiment_name"])
        self._interval = section["samples_log_interval"]
        self._written = {}  # name -> samples at its last value

    def write(self, events):
        for name, value, samples in events:
            if name not in self._written or samples - self._written[name] >= self._interval:
                self._written[name] = samples
                self.experiment.log_metric(name, value, step=samples)


WRITERS = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter, "csv_monitor": CsvWriter, "comet": CometWriter}


def enabled_monitors(config):
    """{str: dict}: the sections of monitors that are on, defaults included."""
    sections = {name: {} for name in WRITERS}
    for path, text in config.shown.items():
        name, _, key = path.partition(".")
        if name in sections:
            sections[name][key] = json.loads(text)
    return {name: section for name, section in sections.items() if section["enabled"]}


class Monitor:
    """Writes metrics on rank 0, to every monitor that is on. ``enabled``: bool, the same on every rank; ``tb_monitor``,
    ``wandb_monitor``, ``csv_monitor``, ``comet_monitor``: the writer, or None."""

    def __init__(self, config=None, rank=0):
        sections = {} if config is None else enabled_monitors(config)
        self.enabled = bool(sections)
        made = {name: WRITERS[name](section) for name, section in sections.items() if rank == 0}
        self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor = (
            made.get(name) for name in ("tensorboard", "wandb", "csv_monitor", "comet"))
        self._writers = made
        self._failed = set()

    def write_events(self, event_list, flush=True):
        """Writes metrics, [(name, value, samples)]: the number of samples so far is the x-axis; a value is a number or
        a tensor of one element. Does nothing on other ranks. A writer that fails warns once, and training goes on.
        ``flush`` has no effect."""
        if not self._writers or not event_list:
            return
        events = [(name, float(value), int(samples)) for name, value, samples in event_list]
        for name, writer in self._writers.items():
            try:
                writer.write(events)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning("%s: metrics could not be written: %s: %s", name, type(error).__name__, error)

    def close(self):
        """Closes the writers."""
        for writer in self._writers.values():
            writer.close()
