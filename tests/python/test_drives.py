"""Drives of offloaded states: several of them, and how they are read and written."""

import os

import torch
from offloaded_training import all_offloaded, make_model, train_steps, whole_weights
from ranks import run_ranks

import strata


def _striped(folders):
    config = all_offloaded("nvme", "nvme", folders[0])
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = folders
    config["aio"] = {"block_size": 65536, "queue_depth": 4, "intra_op_parallelism": 2}
    config["strata"] = {"verify_drives": True}
    reference, _ = strata.initialize(model=make_model(24_000), config=all_offloaded("none", "none", folders[0]))[:2]
    expected = train_steps(reference, 2), whole_weights(reference)
    reference.destroy()
    engine, _ = strata.initialize(model=make_model(24_000), config=config)[:2]
    walked = [os.walk(folder) for folder in folders]
    files = [[os.path.join(at, "states") for at, _, names in walk if "states" in names] for walk in walked]
    assert [len(some) for some in files] == [2, 2], "weights and states have a file on each drive"
    held = 24_000 * 48 * (2 + 2 + 4 + 4)  # of the embedding: bf16 weights, rests of masters, exp_avg, exp_avg_sq
    assert sum(os.path.getsize(file) for some in files for file in some) >= held
    losses, whole = train_steps(engine, 2), whole_weights(engine)
    assert losses == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(whole, expected[1], strict=True))
    engine.destroy()
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_several_drives_hold_the_states_and_the_bits_stay(tmp_path):
    folders = [str(tmp_path / name) for name in ("fast", "slow")]
    for folder in folders:
        os.mkdir(folder)
    run_ranks(1, _striped, folders)
