"""A process that writes a checkpoint or an export dies before any one of its system calls. It leaves the old one or
the new one, whole.

``STRATA_KILLS`` is the number of kills, 20 by default; they are spread over the writers and drawn by a fixed seed.
"""

import os
import random
from pathlib import Path

import pytest
from devices import ON_GPU
from killed_process import run_traced
from ranks import run_ranks
from strata.utils import zero_to_fp32
from test_killed_exports import _read, _same
from tiny_models import config_of, full_parameters, make_batches, make_engine, make_model, train_step
from training_states import snapshot

KILLS = int(os.environ.get("STRATA_KILLS", "20"))
pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="a driver's threads and maps make a fork of each kill take seconds"),
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="follows a process with Linux's ptrace"),
]


def _trained(folder, stage=3, asynchronous=False):
    """An engine after two steps; ``folder`` has its checkpoint of the first."""
    engine = make_engine(make_model(), config_of(stage, checkpoint={"async": asynchronous}))
    for step, tokens in enumerate(make_batches(2, 1), 1):
        train_step(engine, tokens[0])
        if step == 1:
            engine.save_checkpoint(folder, tag="1")
            engine.wait_for_checkpoint()
    return engine


class _Training:
    """Saves a training checkpoint beside an older one."""

    def __init__(self, stage, asynchronous):
        self._stage, self._asynchronous = stage, asynchronous

    def prepare(self, folder):
        return _trained(folder, self._stage, self._asynchronous)

    def write(self, engine, folder):
        engine.save_checkpoint(folder, tag="2")
        engine.wait_for_checkpoint()

    def check(self, folder, states, weights):
        """The step of the checkpoint that an engine loads; later saves do not mind what the dead writer left."""
        engine = make_engine(make_model(), config_of(self._stage))
        path, _ = engine.load_checkpoint(folder)
        assert path is not None, folder
        found, wanted = snapshot(engine), states[engine.global_steps]
        assert found.keys() == wanted.keys(), folder
        assert [name for name in wanted if not found[name].equal(wanted[name])] == [], folder
        step = engine.global_steps
        engine.save_checkpoint(folder, tag="after")
        engine.destroy()
        assert not [name for name in os.listdir(folder) if name.endswith(".partial")], folder
        return step


class _Weights:
    """Writes the weights of step 2 over those of step 1: an engine's own save, or a consolidation."""

    def __init__(self, **consolidation):
        self._consolidation = consolidation

    def prepare(self, folder):
        engine = _trained(f"{folder}-checkpoint", stage=2)
        engine.save_checkpoint(f"{folder}-checkpoint", tag="2")
        if self._consolidation:
            self._convert(folder, "1")
        else:
            engine.load_checkpoint(f"{folder}-checkpoint", tag="1")
            engine.save_16bit_model(folder)
            engine.load_checkpoint(f"{folder}-checkpoint", tag="2")
        return engine

    def _convert(self, folder, step):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            f"{folder}-checkpoint", folder, tag=step, **self._consolidation)

    def write(self, engine, folder):
        if self._consolidation:
            self._convert(folder, "2")
        else:
            engine.save_16bit_model(folder)

    def check(self, folder, states, weights):
        """The step of the weights that transformers would read; 0 where it would say that there are none."""
        try:
            read = _read(Path(folder))
        except FileNotFoundError:
            return 0
        steps = [step for step, wanted in weights.items() if _same(read, wanted)]
        assert steps, f"{folder} has weights of two steps"
        return steps[0]


WRITERS = {
    "training": _Training(3, False),
    "training in the background": _Training(3, True),
    "training at stage 1": _Training(1, False),
    "whole weights": _Weights(),
    "consolidated": _Weights(max_shard_size=None, safe_serialization=True),
    "consolidated in shards": _Weights(max_shard_size="8KB", safe_serialization=True),
    "consolidated as pickles": _Weights(max_shard_size="8KB", safe_serialization=False),
}


def _reference(folder):
    """({step: snapshot}, {step: whole weights})"""
    states, weights = {}, {}
    engine = make_engine(make_model(), config_of(3))
    for step, tokens in enumerate(make_batches(2, 1), 1):
        train_step(engine, tokens[0])
        states[step] = snapshot(engine)
        weights[step] = {name: value.cpu() for name, value in full_parameters(engine.module).items()}
    return states, weights


def _kill(name, folders, seed):
    """Kills a writer once for each folder; returns whether each died. The process has no threads: it forks."""
    writer, draw = WRITERS[name], random.Random(seed)

    def trial(folder, kill_at=None):
        return run_traced(lambda: writer.prepare(folder), lambda engine: writer.write(engine, folder), kill_at)

    calls = trial(f"{folders[0]}-whole")
    assert calls > 20, calls
    return [trial(folder, kill_at) >= kill_at for folder in folders for kill_at in [draw.randint(1, calls)]]


def _check(name, folders, states, weights):
    return [WRITERS[name].check(folder, states, weights) for folder in folders]


@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(name, tmp_path):
    place = list(WRITERS).index(name)
    kills = len(range(place, KILLS, len(WRITERS)))
    folders = [str(tmp_path / f"{kill}") for kill in range(kills)]
    died = run_ranks(1, _kill, name, folders, place, timeout=120.0 + 2 * kills)[0]
    assert sum(died) >= kills * 0.5, died  # threads of a writer may make fewer calls than the first time
    states, weights = run_ranks(1, _reference, str(tmp_path / "reference"))[0]
    steps = run_ranks(1, _check, name, folders, states, weights, timeout=120.0 + kills)[0]
    assert all(step == 2 for step, dead in zip(steps, died) if not dead), (steps, died)
