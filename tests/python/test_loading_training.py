"""Loading training checkpoints into a model that differs from the one that saved them: the engine stores nothing, or,
if the script asks for it, the parts that fit."""

import logging
import os
import resource

import pytest
import torch
from ranks import run_ranks
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
    train_step,
)
from training_states import snapshot, told_by


class Counted(torch.nn.Module):
    """A layer, and buffers by name and length."""

    def __init__(self, **buffers):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        for name, length in buffers.items():
            self.register_buffer(name, torch.arange(float(length)))

    def forward(self, hidden):
        return self.layer(hidden)


def _trained(engine, steps=2):
    for _ in range(steps):
        engine.backward(engine(torch.ones(4, 8, device=engine.device)).square().mean())
        engine.step()
    return engine


def _said(engine, *arguments, **more):
    """The lines that the package logs while the engine loads a checkpoint."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("strata")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        engine.load_checkpoint(*arguments, **more)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return records


def _other_buffers(folder):
    rank, _ = rank_and_world()

    def make(**buffers):
        torch.manual_seed(1)
        return make_engine(Counted(**buffers), config_of(3))

    engine = _trained(make(b=4))
    with torch.no_grad():
        engine.module.b.fill_(7.0)
    engine.save_checkpoint(folder, tag="t")
    trained = full_parameters(engine.module)
    engine.destroy()
    words = {
        "shape": ({"b": 6}, "1 buffers have another shape: b: [6] in the model, [4] in the checkpoint"),
        "extra": ({"b": 4, "c": 3}, "1 buffers are not in the checkpoint: c"),
        "missing": ({}, "1 buffers are not in the model: b"),
    }
    for buffers, expected in words.values():
        engine = make(**buffers)
        before = full_parameters(engine.module)
        told = told_by(engine.load_checkpoint, folder, tag="t")
        assert told.startswith("FormatError") and expected in told, told
        assert differences(full_parameters(engine.module), before) == [] and engine.global_steps == 0
        said = _said(engine, folder, tag="t", load_module_strict=False)
        assert rank != 0 or any("1 buffers are " in line and "were skipped: " in line for line in said), said
        assert differences(full_parameters(engine.module), trained) == [] and engine.global_steps == 2
        if buffers.get("b") == 4:
            assert engine.module.b.tolist() == [7.0] * 4
        engine.destroy()


def test_other_buffers_are_found_before_anything_is_stored(tmp_path):
    run_ranks(2, _other_buffers, str(tmp_path))


class Refusing(torch.optim.lr_scheduler.StepLR):
    def load_state_dict(self, state_dict):
        raise ValueError("not mine")


def _other_groups(folder):
    def make(groups):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        ones = list(model.parameters())
        given = [{"params": ones}] if groups == 1 else [{"params": ones[:2]}, {"params": ones[2:], "lr": 0.5}]
        return make_engine(model, config_of(3), model_parameters=given)

    engine = _trained(make(1))
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = make(2)
    before = full_parameters(engine.module)
    told = told_by(engine.load_checkpoint, folder, tag="t")
    assert "2 param groups, the checkpoint's had 1" in told and "load_optimizer_states=False" in told
    assert differences(full_parameters(engine.module), before) == [] and engine.global_steps == 0
    engine.load_checkpoint(folder, tag="t", load_optimizer_states=False)
    assert engine.global_steps == 2
    # The scheduler refuses its state after the weights were loaded: the engine then holds values of two runs.
    engine.lr_scheduler = Refusing(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)
    engine.save_checkpoint(folder, tag="scheduled")
    with pytest.raises(ValueError, match="not mine"):
        engine.load_checkpoint(folder, tag="scheduled", load_optimizer_states=False)
    assert "loading a checkpoint failed half-way" in told_by(engine.save_checkpoint, folder, tag="mixture")
    engine.load_checkpoint(folder, tag="scheduled", load_optimizer_states=False, load_lr_scheduler_states=False)
    engine.save_checkpoint(folder, tag="after")


def test_other_param_groups_are_found_before_anything_is_stored(tmp_path):
    run_ranks(2, _other_groups, str(tmp_path))


def _links_and_tags(folder):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    for tag, batch in zip("ab", make_batches(2, world)):
        train_step(engine, batch[rank])
        engine.save_checkpoint(folder, tag=tag)
    told = [told_by(engine.load_checkpoint, folder, tag="ab"[rank]),
            told_by(engine.load_checkpoint, folder, tag="a" if rank else None)]
    before = snapshot(engine)
    for name in ("model-00001-of-00002.safetensors", "manifest.json"):
        inside, outside = f"{folder}/a/{name}", f"{folder}/{name}"
        engine._collectives.barrier()
        if rank == 0:
            os.rename(inside, outside)
            os.symlink(outside, inside)
        engine._collectives.barrier()
        told.append(told_by(engine.load_checkpoint, folder, tag="a"))
        engine._collectives.barrier()
        if rank == 0:
            os.replace(outside, inside)
        engine._collectives.barrier()
    assert differences(snapshot(engine), before) == []
    engine.load_checkpoint(folder, tag="a")
    return told


def test_links_out_of_the_folder_and_different_tags_are_refused_on_every_rank(tmp_path):
    for told in run_ranks(2, _links_and_tags, str(tmp_path)):
        assert "rank 0 has 'a', rank 1 has 'b'" in told[0] and "rank 0 has no tag, rank 1 has 'a'" in told[1]
        assert told[0].startswith("UsageError")
        assert "a link that leads out of its folder" in told[2] and "model-00001" in told[2]
        assert "no whole checkpoint 'a'" in told[3]


def _save(folder):
    engine = make_engine(make_model(), config_of(3))
    train_step(engine, make_batches(1, 1)[0][0])
    engine.save_checkpoint(folder, tag="t")


def _with_few_descriptors(folder, spare, hard):
    """Loads with at most ``spare`` further file descriptors; the process may raise the limit unless it is ``hard``."""
    engine = make_engine(make_model(), config_of(3))
    engine.memory_report()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    there = len(os.listdir("/proc/self/fd")) + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (there, there if hard else most))
    engine.load_checkpoint(folder, tag="t")
    assert engine.global_steps == 1


def test_a_rank_opens_the_files_that_it_reads_of(tmp_path):
    run_ranks(4, _save, str(tmp_path))
    run_ranks(4, _with_few_descriptors, str(tmp_path), 10, True)  # of eight files and their second ways
    run_ranks(1, _with_few_descriptors, str(tmp_path), 6, False)  # all files, with a higher limit of its own


class Named(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in names})

    def forward(self, hidden):
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


def _skipped(folder):
    engine = _trained(make_engine(Named("abcdefghijk"), config_of(3)))
    engine.save_checkpoint(folder, tag="t")
    saved = full_parameters(engine.module)["layers.a.weight"]
    engine.destroy()
    engine = make_engine(Named("a"), config_of(3))
    said = _said(engine, folder, tag="t", load_module_strict=False)
    assert same_bits(full_parameters(engine.module)["layers.a.weight"], saved)
    return said


def test_all_that_was_skipped_is_listed(tmp_path):
    said = run_ranks(1, _skipped, str(tmp_path))[0]
    warning, listed = (next(line for line in said if word in line) for word in ("were skipped", "parameters that are"))
    assert "10 parameters are not in the model" in warning and "and 2 more" in warning and "layers.k" not in warning
    assert all(f"layers.{name}.weight" in listed for name in "bcdefghijk")


def _whole_state(folder):
    """A state dict is gathered unit by unit, however many there are."""
    rank, _ = rank_and_world()
    engine = make_engine(make_model(blocks=12), config_of(3, live_bytes=1))
    state = engine.state_dict()
    whole = sum(p.numel() * 4 for p in make_model(blocks=12).parameters())
    block = sum(p.numel() * 4 for p in make_model(blocks=1).layers.parameters())
    held = engine.memory_report()["device", "gathered weights"][1]
    assert bool(state) == (rank == 0)
    assert block <= held <= 2 * (block + 4096) < whole / 3
    assert not state or sum(t.numel() * 4 for t in state.values()) == whole


def test_a_whole_state_dict_takes_the_memory_of_a_unit(tmp_path):
    run_ranks(2, _whole_state, str(tmp_path))
