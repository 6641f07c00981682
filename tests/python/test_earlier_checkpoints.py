"""Checkpoints that earlier trees wrote load, and saving them again gives the same bytes."""

import json
import os

import earlier_checkpoints as earlier
import pytest
import strata
import torch
from earlier_checkpoints import CELLS, WRITTEN, name_of
from ranks import run_ranks
from tiny_models import full_parameters, rank_and_world
from training_states import snapshot


# Keys of the configuration that are newer than these checkpoints; a manifest names them.
NEW_KEYS = {"strata.cuda_graphs", "strata.staging", "strata.state_cache", "strata.update", "strata.update_at",
            "sequence_parallel_size", "strata.sequence_parallel.size", "strata.loss", "strata.mlp_piece",
            "strata.activations.device", "activation_checkpointing.cpu_checkpointing",
            "strata.optimizer_states", "strata.min_8bit_size", "strata.keep_small_moments"}


def _without_new_keys(manifest):
    """The text of a manifest, but for its checksum, without the keys that earlier trees did not have."""
    values = json.loads(manifest.read_text())
    del values["checksum"]
    config = values["training"]["config"]
    values["training"]["config"] = {key: value for key, value in config.items() if key not in NEW_KEYS}
    return json.dumps(values)


def _saved_again(folder):
    """The checkpoints of this many ranks; as the first ones, they name torch 2.11 as what wrote them."""
    os.chdir(folder)
    assert strata._C.__name__  # loaded for the torch that is here
    torch.__version__ = "2.11.0+cu130"
    for cell in CELLS:
        if cell[0] == rank_and_world()[1]:
            engine = earlier.engine_of(*cell[1:])
            engine.load_checkpoint(str(WRITTEN / name_of(*cell)))
            engine.save_checkpoint(name_of(*cell), tag="one_step")
            engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loading_and_saving_gives_the_same_bytes(world, tmp_path):
    run_ranks(world, _saved_again, str(tmp_path))
    cells = [name_of(*cell) for cell in CELLS if cell[0] == world]
    assert len(cells) >= 2
    for cell in cells:
        before, after = WRITTEN / cell / "one_step", tmp_path / cell / "one_step"
        names = sorted(path.name for path in before.iterdir())
        assert sorted(path.name for path in after.iterdir()) == names and len(names) > 2 * world
        same = [name for name in names if (before / name).read_bytes() == (after / name).read_bytes()]
        assert names == sorted([*same, "manifest.json"])
        assert _without_new_keys(before / "manifest.json") == _without_new_keys(after / "manifest.json")


def _loaded(stages, folder):
    """Per cell and stage the loaded state, and whole weights after one more step."""
    found = []
    os.chdir(folder)
    for cell in CELLS:
        for stage in stages:
            engine = earlier.engine_of(stage, *cell[2:])
            engine.load_checkpoint(str(WRITTEN / name_of(*cell)))
            assert engine.global_steps == 1
            loaded = {name: value.float() for name, value in snapshot(engine).items()}
            earlier.train_step(engine)
            whole = {name: value.float().cpu() for name, value in full_parameters(engine.module).items()}
            found.append((cell, loaded, whole))
            engine.destroy()
    return found


def _expected():
    """Weights, exp_avg and exp_avg_sq after one step of plain torch, and weights after two."""
    model = earlier.Weighted()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    values = []
    for _ in range(2):
        for parameter in trained.values():
            parameter.grad = earlier.gradient_of(parameter)
        optimizer.step()
        values.append({name: p.detach().clone() for name, p in trained.items()})
    return *values, {"frozen": model.frozen.detach()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_ranks_and_stages_go_on_from_it(world, tmp_path):
    first, second, frozen = _expected()
    for cell, loaded, weights in run_ranks(world, _loaded, (1, 3) if world == 2 else (3,), str(tmp_path))[0]:
        for name, value in first.items():
            kept = loaded.get(f"master {name}", loaded[name])
            torch.testing.assert_close(kept.view(-1), value.view(-1), rtol=1e-6, atol=1e-6)
        half = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[cell[2]]
        for name, value in (second | frozen).items():
            torch.testing.assert_close(weights[name], value, rtol=half, atol=1e-6)
