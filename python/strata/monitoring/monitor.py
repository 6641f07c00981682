"""``engine.monitor``: writes metrics to the monitors that the configuration names."""

import json
import logging

from .writers import WRITERS

logger = logging.getLogger("strata")


def section_of(config, name):
    """{key: value} of a section of a _C.Config about the output of this rank, defaults included."""
    start = f"{name}."
    return {path[len(start):]: json.loads(text) for path, text in config.shown.items() if path.startswith(start)}


def enabled_monitors(config):
    """[str]: the sections of monitors that are on."""
    return [name for name in WRITERS if section_of(config, name)["enabled"]]


class Monitor:
    """Writes metrics on rank 0, to every monitor that is on.

    Attributes:
        enabled: bool, the same on every rank.
        tb_monitor, wandb_monitor, csv_monitor, comet_monitor: the writer, or None.
    """

    def __init__(self, config=None, rank=0):
        names = [] if config is None else enabled_monitors(config)
        self.enabled = bool(names)
        made = {name: WRITERS[name](section_of(config, name)) for name in names if rank == 0}
        self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor = (
            made.get(name) for name in ("tensorboard", "wandb", "csv_monitor", "comet")
        )
        self._writers = made
        self._failed = set()

    def write_events(self, event_list, flush=True):
        """Writes metrics; does nothing on other ranks. A writer that fails warns once, and training goes on.

        Args:
            event_list: [(name, value, samples)]: the number of samples so far is the x-axis; a value is a number or a
                tensor of one element.
            flush: accepted for DeepSpeed's sake.
        """
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
