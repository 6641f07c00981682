"""Weights are written into a folder that holds others. A reader finds one whole model, whenever the writer ends, and
only the new one afterwards."""

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from soak import also
from strata.checkpoint import saving
from strata.utils import zero_to_fp32
from tiny_models import config_of, make_batches, make_engine, make_model, same_bits, train_step

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the numbers of x86-64's system calls")

# System calls that change a folder's names: rename, unlink, renameat, unlinkat, renameat2.
CALLS = {82, 87, 264, 263, 316}
TRACEME, PEEKUSER, SYSCALL, SETOPTIONS, GOOD_AND_EXITKILL = 0, 3, 24, 0x4200, 0x100001
NUMBER_OF_CALL = 15 * 8  # in the registers


def _ptrace(request, pid, address=0, data=0):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    return libc.ptrace(request, pid, address, data)


def _killed_before(call, write):
    """Whether a process that runs ``write`` comes as far as its ``call``-th change of names, before which it is
    killed."""
    pid = os.fork()
    if pid == 0:
        try:
            _ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            write()
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.waitpid(pid, 0)
    _ptrace(SETOPTIONS, pid, 0, GOOD_AND_EXITKILL)
    changes, entering, pending = 0, False, 0
    while True:
        _ptrace(SYSCALL, pid, 0, pending)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            assert status == 0, status
            return False
        pending = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            pending = os.WSTOPSIG(status)
            continue
        entering = not entering
        if not entering or _ptrace(PEEKUSER, pid, NUMBER_OF_CALL) not in CALLS:
            continue
        changes += 1
        if changes == call:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True


def _read(folder):
    """Reads the files that transformers would take from a folder: the first kind that is there. FileNotFoundError: a
    file is missing."""
    from safetensors.torch import load_file

    for single, read in (("model.safetensors", load_file), ("pytorch_model.bin", torch.load)):
        if (folder / single).exists():
            return read(folder / single)
        if (folder / f"{single}.index.json").exists():
            files = json.loads((folder / f"{single}.index.json").read_text())["weight_map"]
            return {name: read(folder / file)[name] for name, file in files.items()}
    raise FileNotFoundError(folder)


def _same(found, wanted):
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """({name: function that writes the weights of step "1" or "2" into a folder}, {step: weights})"""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make_model()
    engine = make_engine(model, config_of(1))
    weights = {}
    for step, tokens in enumerate(make_batches(2, 1), 1):
        train_step(engine, tokens[0])
        engine.save_checkpoint(folder, tag=str(step))
        weights[str(step)] = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    engine.destroy()

    def convert(size, safe):
        return lambda out, step: zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            folder, out, size, safe_serialization=safe, tag=step)

    def save_16bit_model(out, step):
        whole = SimpleNamespace(global_rank=0, module=None, _collectives=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "agree_after", lambda *_: contextlib.nullcontext())
            patch.setattr(saving, "whole_state_dict", lambda *_: weights[step])
            saving.save_whole(whole, out, saving.WEIGHTS, True)

    return {
        "one safetensors": convert(None, True), "safetensors": convert("8KB", True),
        "one pickle": convert(None, False), "pickles": convert("8KB", False), "save_16bit_model": save_16bit_model,
    }, weights  # fmt: skip


@pytest.mark.parametrize("later", ["safetensors", "one pickle",
                                   *also("one safetensors", "pickles", "save_16bit_model")])
def test_a_folder_has_the_old_model_or_the_new_one_and_never_both(writers, later, tmp_path):
    write, weights = writers
    alone = tmp_path / "alone"
    write[later](alone, "2")
    wanted = sorted(os.listdir(alone))
    for earlier in ("one safetensors", "safetensors", "one pickle", "pickles"):
        before, out = tmp_path / "before", tmp_path / "out"
        shutil.rmtree(before, ignore_errors=True)
        write[earlier](before, "1")
        found, call, killed = [], 0, True
        while killed:
            call += 1
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(before, out)
            (out / "mine.bin").write_text("stays")
            killed = _killed_before(call, lambda: write[later](out, "2"))
            try:
                read = _read(out)
                found.append([step for step in weights if _same(read, weights[step])])
            except FileNotFoundError:  # a reader says so
                found.append("none")
            assert found[-1], (earlier, call)  # a mix of two
        assert call >= 2 and found[0] == ["1"] and found[-1] == ["2"], (earlier, found)
        assert found == sorted(found, key=[["1"], "none", ["2"]].index), (earlier, found)
        assert sorted(os.listdir(out)) == sorted([*wanted, "mine.bin"]), earlier
