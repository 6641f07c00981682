"""Checkpoints that are exported are those that DeepSpeed would have written: it goes on from them."""

import json
import os
import shutil
import warnings

import pytest
import strata
import torch
from deepspeed_over_gloo import deepspeed_over_gloo
from deepspeed_runs import STEPS, WORLD, client_state_of_script, convert_to_universal, losses_of, make_engine
from devices import ON_GPU
from ranks import run_ranks
from strata.exporting.__main__ import main as command_line
from strata.exporting.deepspeed import Layout, export_deepspeed
from strata.importing.deepspeed import import_deepspeed
from strata.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tiny_models import rank_and_world

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="compared with DeepSpeed on the CPU"),
    pytest.mark.xdist_group("export_deepspeed"),  # tests of this file share the checkpoint
]
CASES = [(1, "bf16"), (2, "fp32"), (3, "bf16")]
TOLERANCES = {"fp32": 1e-6, "bf16": 1e-4}  # of losses, as test_against_deepspeed.py has them


def _save_with_strata(folder):
    """By case: losses of this rank after the checkpoint."""
    rank, _ = rank_and_world()
    told = {}
    for stage, dtype in CASES:
        engine = make_engine(strata, stage, dtype, seed=1)
        losses_of(engine, range(STEPS), [rank])
        engine.save_checkpoint(f"{folder}/{stage}-{dtype}", client_state=client_state_of_script())
        told[stage, dtype] = losses_of(engine, range(STEPS, 2 * STEPS), [rank])
        engine.destroy()
    return told


def _go_on_with_deepspeed(folder, saved_again):
    """By case: losses, rates and client state of DeepSpeed after it has loaded; it saves what it loaded."""
    warnings.simplefilter("ignore")
    deepspeed = deepspeed_over_gloo()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, _ = rank_and_world()
    told = {}
    for stage, dtype in CASES:
        engine = make_engine(deepspeed, stage, dtype, seed=2)
        with torch.no_grad():
            engine.module.factor.zero_()
        path, client_state = engine.load_checkpoint(f"{folder}/{stage}-{dtype}")
        assert path is not None and engine.global_steps == STEPS
        engine.save_checkpoint(f"{saved_again}/{stage}-{dtype}", client_state=client_state_of_script())
        told[stage, dtype] = (losses_of(engine, range(STEPS, 2 * STEPS), [rank]), engine.get_lr(),
                              engine.module.factor.tolist(), client_state["epoch"], client_state["pair"])
        engine.destroy()
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of Strata's checkpoints, losses after them by rank and case)."""
    folder = tmp_path_factory.mktemp("strata")
    return folder, run_ranks(WORLD, _save_with_strata, str(folder))


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for stage, dtype in CASES:
        export_deepspeed(saved[0] / f"{stage}-{dtype}", folder / f"{stage}-{dtype}", sub_group_size=8)
    return folder


def test_deepspeed_goes_on_from_an_export_and_writes_the_same(saved, exported, tmp_path):
    """Losses, rates, buffers and frozen weights as Strata's own; the bits that DeepSpeed saves are those it loaded."""
    told = run_ranks(WORLD, _go_on_with_deepspeed, str(exported), str(tmp_path), timeout=300.0,
                     env={"DS_ACCELERATOR": "cpu"})  # fmt: skip
    for rank in range(WORLD):
        for stage, dtype in CASES:
            losses, rates, factor, epoch, pair = told[rank][stage, dtype]
            assert losses == pytest.approx(saved[1][rank][stage, dtype], rel=TOLERANCES[dtype]), (stage, dtype)
            assert losses[0] != pytest.approx(losses[-1], rel=1e-3), "training must have changed something"
            assert factor == [1.5] * 8 and (epoch, pair) == (3, (1, "x")) and len(rates) == 2
    for stage, dtype in CASES:
        ours, theirs = (f"{folder}/{stage}-{dtype}/global_step{STEPS}" for folder in (exported, tmp_path))
        assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs))
        for name in os.listdir(theirs):
            _require_what_deepspeed_writes(*(torch.load(f"{f}/{name}", weights_only=False) for f in (ours, theirs)),
                                           (stage, dtype, name))


def _require_what_deepspeed_writes(ours, theirs, where):
    """Equal, key by key, but for keys that only another class of DeepSpeed's optimizers writes."""
    if isinstance(theirs, torch.Tensor):
        ours = torch.as_tensor(ours, dtype=theirs.dtype) if where[-1] == "step" else ours
        assert ours.dtype == theirs.dtype, where
        size = min(ours.numel(), theirs.numel())  # one of its classes strips the padding, another one keeps it
        assert torch.equal(ours.flatten()[:size], theirs.detach().flatten()[:size]), where
        assert not ours.flatten()[size:].any() and not theirs.flatten()[size:].any(), where
    elif isinstance(theirs, dict):
        for key, value in theirs.items():
            if key != "ds_config" and (key in ours or "param_groups" not in where):  # which torch's classes complete
                assert key in ours, (*where, key)
                _require_what_deepspeed_writes(ours[key], value, (*where, key))
    elif isinstance(theirs, (list, tuple)) and type(theirs) is type(ours):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs)):
            _require_what_deepspeed_writes(*pair, (*where, i))
    elif hasattr(theirs, "__dict__") and not isinstance(theirs, (int, torch.Size)):
        assert type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys(), where
        assert repr(vars(ours)) == repr(vars(theirs)), where
    elif not hasattr(theirs, "shape"):
        assert ours == theirs, where


def test_what_was_imported_is_exported_as_it_was(exported, tmp_path):
    for stage, dtype in CASES:
        import_deepspeed(exported / f"{stage}-{dtype}", tmp_path / "in" / f"{stage}-{dtype}")
        again = export_deepspeed(tmp_path / "in" / f"{stage}-{dtype}", tmp_path / "out" / f"{stage}-{dtype}",
                                 sub_group_size=8)
        first = f"{exported}/{stage}-{dtype}/global_step{STEPS}"
        for name in os.listdir(first):
            _require_what_deepspeed_writes(*(torch.load(f"{f}/{name}", weights_only=False) for f in (again, first)),
                                           (stage, dtype, name))


@pytest.mark.parametrize(("stage", "world"), [(1, 3), (2, 1), (3, 3), (3, 1)])
def test_the_stage_and_the_ranks_are_free(saved, stage, world, tmp_path):
    """DeepSpeed's own tool finds the same weights, whatever the number of files."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as theirs

    for source in ("2-fp32", "3-bf16"):
        folder = tmp_path / source
        export_deepspeed(saved[0] / source, folder, world_size=world, stage=stage)
        found = theirs(folder)
        ours = get_fp32_state_dict_from_zero_checkpoint(saved[0] / source)
        assert found.keys() <= ours.keys() and len(found) >= 6
        for name, value in found.items():
            assert torch.equal(value.float(), ours[name].float()), (source, name)


def test_deepspeeds_universal_conversion_reads_it(exported, tmp_path):
    source = shutil.copytree(exported / "2-fp32" / f"global_step{STEPS}", tmp_path / "step")
    convert_to_universal(source, tmp_path / "universal")
    assert (tmp_path / "universal" / "zero" / "back.weight" / "exp_avg.pt").exists()


def test_every_element_of_a_layout_has_one_place():
    groups = [{"a": [5, 3], "b": [1], "c": [2, 2]}, {"d": [7]}]
    for stage in (1, 2, 3):
        for world in (1, 2, 3, 8):
            for size in (1, 4, 10**9):
                layout = Layout(groups, world, stage, size)
                taken = set()
                for name, numel in (("a", 15), ("b", 1), ("c", 4), ("d", 7)):
                    runs = layout.runs_of(name)
                    assert [i for run in runs for i in range(run.begin, run.begin + run.numel)] == list(range(numel))
                    places = {(r.rank, r.flat, r.at + i) for r in runs for i in range(r.numel)}
                    assert not places & taken and all(at < layout.numel[flat] for _, flat, at in places)
                    taken |= places
                assert sorted(flat for own in layout.group_flats for flat in own) == list(range(len(layout.shapes)))


def test_bad_input(saved, exported, tmp_path, capsys):
    source = saved[0] / "2-fp32"
    with pytest.raises(strata.UsageError, match="exists already; give another folder"):
        export_deepspeed(source, exported / "2-fp32")
    with pytest.raises(strata.UsageError, match="stage must be 1, 2 or 3; got 4"):
        export_deepspeed(source, tmp_path, stage=4)
    with pytest.raises(strata.UsageError, match="at least 1; got 0"):
        export_deepspeed(source, tmp_path, world_size=0)
    with pytest.raises(strata.IoError, match="no training checkpoint of Strata"):
        export_deepspeed(exported / "2-fp32", tmp_path)
    copied = shutil.copytree(source, tmp_path / "damaged")
    for path in (copied / f"global_step{STEPS}").glob("optimizer-*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(strata.FormatError):
        export_deepspeed(copied, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir()), "nothing is left of what failed"
    assert command_line(["deepspeed", str(tmp_path / "damaged"), str(tmp_path / "out"), "--stage", "9"]) == 2
    assert command_line(["deepspeed", str(tmp_path), str(tmp_path / "out")]) == 1
    assert command_line(["deepspeed", str(source), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tag"] == f"global_step{STEPS}"
