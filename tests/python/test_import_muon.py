"""Checkpoints of DeepSpeed's Muon go on under Strata."""

import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
import strata
import torch
from deepspeed_muon import (
    CASES, ENV, PARAMS, STEPS, WORLD, Model, batch_of, go_on_with_deepspeed, make_engine, name_of, train_step,
    train_with_deepspeed,
)  # fmt: skip
from devices import ON_GPU
from ranks import run_ranks
from strata.checkpoint.library_states import map8
from strata.exporting.deepspeed import export_deepspeed
from strata.importing.deepspeed import import_deepspeed
from strata.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tiny_models import rank_and_world

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="compared with DeepSpeed on the CPU"),
    pytest.mark.xdist_group("import_muon"),  # tests of this file share DeepSpeed's checkpoints
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of DeepSpeed's checkpoints, each rank's answer)."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, run_ranks(WORLD, train_with_deepspeed, str(folder), timeout=400.0, env=ENV)


@pytest.fixture(scope="module")
def imported(saved, tmp_path_factory):
    """Folder of the same checkpoints, as Strata's."""
    out = tmp_path_factory.mktemp("imported")
    for case in CASES:
        import_deepspeed(saved[0] / name_of(case), out / name_of(case))
    return out


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_masters_momentum_and_moments_have_deepspeeds_bits(saved, imported, case):
    checkpoint = strata._C.TrainingCheckpoint(str(imported / name_of(case) / f"global_step{STEPS}"))
    expected = {**saved[1][0][case][0], **saved[1][1][case][0]}  # a rank has the momentum of its matrices
    names = {name for name, _ in Model().named_parameters()}
    matrices = {f"layers.{i}.weight" for i in range(3)}
    assert expected.keys() == ({("value", name) for name in names} | {("momentum_buffer", name) for name in matrices}
                               | {(kind, name) for name in names - matrices for kind in ("exp_avg", "exp_avg_sq")})
    for (kind, name), value in expected.items():
        found = checkpoint.read("parameter", name, kind).float().numpy()
        assert numpy.array_equal(found, value), (kind, name)
    for name in matrices:
        assert not checkpoint.has(name, "exp_avg")
    steps = json.loads(checkpoint.training)["optimizer_steps"]
    assert steps == {"all": STEPS, "missed": {}}


def _reference(folder, case):
    """Plain torch at the checkpoint: the model in fp32, and torch's own Muon and AdamW."""
    checkpoint = strata._C.TrainingCheckpoint(f"{folder}/{name_of(case)}/global_step{STEPS}")
    model = Model()
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if "layers" in name}
    others = {name: p for name, p in named.items() if "layers" not in name}
    muon = torch.optim.Muon(matrices.values(), lr=PARAMS["lr"], momentum=PARAMS["momentum"], weight_decay=0.1)
    adamw = torch.optim.AdamW(others.values(), lr=PARAMS["adam_lr"], betas=PARAMS["betas"], eps=1e-8, weight_decay=0.1)
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(checkpoint.read("parameter", name))
    for name, p in matrices.items():
        muon.state[p]["momentum_buffer"] = checkpoint.read("parameter", name, "momentum_buffer").float()
    for name, p in others.items():
        moments = {kind: checkpoint.read("parameter", name, kind) for kind in ("exp_avg", "exp_avg_sq")}
        adamw.state[p] = {"step": torch.tensor(float(STEPS)), **moments}
    return model, (muon, adamw)


def _next_step(folder, stage, case):
    rank, world = rank_and_world()
    ranks = [rank] if world == WORLD else range(WORLD)
    engine = make_engine(strata, (stage, *case[1:]), seed=2, accumulation=len(ranks))
    path, _ = engine.load_checkpoint(f"{folder}/{name_of(case)}")
    assert os.path.basename(path) == f"global_step{STEPS}" and engine.global_steps == STEPS
    losses = train_step(engine, STEPS, ranks)
    model, optimizers = _reference(folder, case)
    for other in range(WORLD):
        (model(batch_of(STEPS, other)) / WORLD).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, p in engine.module.named_parameters():
        found = strata.utils.safe_get_full_fp32_param(p)
        if case[1] == "fp32":  # else gradients are of weights in bf16
            torch.testing.assert_close(found, dict(model.named_parameters())[name].detach(), rtol=1e-5, atol=1e-5)
    losses += train_step(engine, STEPS + 1, ranks)
    engine.destroy()
    return losses


@pytest.mark.parametrize("world", [2, 1])
def test_the_next_step_is_that_of_torch_and_nearly_deepspeeds(saved, imported, world):
    """DeepSpeed's Newton-Schulz has other roundings than torch's."""
    for case in CASES:
        stage = 3 if world == 1 else case[0]
        for rank, losses in enumerate(run_ranks(world, _next_step, str(imported), stage, case)):
            expected = [saved[1][rank][case][1]] if world == WORLD else [t[case][1] for t in saved[1]]
            wanted = [loss for step in zip(*expected) for loss in step]
            assert losses == pytest.approx(wanted, rel=2e-3), case
            assert losses[0] == pytest.approx(wanted[0], rel=1e-6 if case[1] == "fp32" else 1e-4), case


# --- states that cannot be imported ---


def _change(folder, rank, change):
    path = next((folder / f"global_step{STEPS}").glob(f"*rank_{rank}_mp_rank_00_optim*"))
    content = torch.load(path, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, path)


def test_states_of_another_size_are_refused_and_weights_are_not(saved, tmp_path):
    def cut(content):
        state = content["base_optimizer_state"]["state"][0]
        state["momentum_buffer"] = state["momentum_buffer"][:-1].clone()

    folder = shutil.copytree(saved[0] / "1-fp32", tmp_path / "cut")
    _change(folder, 1, cut)
    with pytest.raises(strata.FormatError, match=r"'momentum_buffer' of param group 0 .* has \[225, 175\] elements"):
        import_deepspeed(folder, tmp_path / "out")
    expected = saved[1][0][1, "fp32", False][0]["value", "layers.1.weight"]
    assert numpy.array_equal(get_fp32_state_dict_from_zero_checkpoint(folder)["layers.1.weight"].numpy(), expected)


def test_what_was_imported_is_exported_as_deepspeed_wrote_it(saved, imported, tmp_path):
    for case in CASES:
        path = export_deepspeed(imported / name_of(case), tmp_path / name_of(case), sub_group_size=60)
        for rank in range(WORLD):
            source = saved[0] / name_of(case) / f"global_step{STEPS}"
            ours, theirs = (_states_in(folder, rank) for folder in (path, source))
            assert ours.keys() == theirs.keys()
            for flat, states in theirs.items():
                assert ours[flat].keys() == states.keys(), (case, rank, flat)
                for kind, value in states.items():
                    found = torch.as_tensor(ours[flat][kind]).to(value.dtype)
                    if kind == "momentum_buffer":
                        assert found.shape == value.shape, (case, rank)
                    size = min(found.numel(), value.numel())  # one of its classes strips the padding
                    assert torch.equal(found.flatten()[:size], value.flatten()[:size]), (case, rank, kind)


EXPORTED = CASES[::2]


def _train_with_strata(folder):
    rank, _ = rank_and_world()
    told = {}
    for case in EXPORTED:
        engine = make_engine(strata, case)
        for step in range(STEPS):
            train_step(engine, step, [rank])
        engine.save_checkpoint(f"{folder}/{name_of(case)}")
        told[case] = [train_step(engine, step, [rank])[0] for step in range(STEPS, STEPS + 2)]
        engine.destroy()
    return told


def test_deepspeed_goes_on_from_an_export(tmp_path):
    """Its Newton-Schulz has other roundings than torch's."""
    ours = run_ranks(WORLD, _train_with_strata, str(tmp_path / "ours"))
    for case in EXPORTED:
        export_deepspeed(tmp_path / "ours" / name_of(case), tmp_path / "out" / name_of(case), sub_group_size=60)
    theirs = run_ranks(WORLD, go_on_with_deepspeed, str(tmp_path / "out"), EXPORTED, timeout=300.0, env=ENV)
    for rank in range(WORLD):
        for case in EXPORTED:
            assert theirs[rank][case][0] == pytest.approx(ours[rank][case][0], rel=1e-6), case
            assert theirs[rank][case][1] == pytest.approx(ours[rank][case][1], rel=2e-3), case


def _states_in(folder, rank):
    content = torch.load(next(Path(folder).glob(f"*rank_{rank}_mp_rank_00_optim*")), weights_only=False)
    content = content["optimizer_state_dict"]
    return content.get("base_optimizer_state", content.get("optimizer_state_dict"))["state"]


def test_a_momentum_that_is_not_there_is_missed(saved, tmp_path):
    folder = shutil.copytree(saved[0] / "1-fp32", tmp_path / "none")
    for rank in range(WORLD):
        _change(folder, rank, lambda content: content["base_optimizer_state"]["state"].pop(0))
    with pytest.raises(strata.FormatError, match="no momentum_buffer of 'layers.1.weight', which has taken 3 steps"):
        import_deepspeed(folder, tmp_path / "out")


def test_lion_has_one_state_and_counts_no_steps(saved, tmp_path):
    def change(content):
        states = content["base_optimizer_state"]["state"]
        states[1] = {"exp_avg": states[1]["exp_avg"]}

    folder = shutil.copytree(saved[0] / "1-fp32", tmp_path / "lion")
    for rank in range(WORLD):
        _change(folder, rank, change)
    found = strata._C.TrainingCheckpoint(import_deepspeed(folder, tmp_path / "out"))
    expected = saved[1][0][1, "fp32", False][0]["exp_avg", "norm.bias"]
    assert numpy.array_equal(found.read("parameter", "norm.bias", "exp_avg").numpy(), expected)
    assert "exp_avg_sq" not in found.kinds
    assert json.loads(found.training)["optimizer_steps"] == {"all": STEPS, "missed": {}}


# --- bitsandbytes' optimizers under DeepSpeed, whose blocks count in the flat tensors ---


def test_codes_in_flat_tensors_become_numbers(saved, tmp_path):
    folder = shutil.copytree(saved[0] / "1-fp32", tmp_path / "coded")
    signed, unsigned = map8(True), map8(False)
    written = []

    def encode(content):
        generator = torch.Generator().manual_seed(len(written))
        of_adam = content["base_optimizer_state"]["state"][1]
        size = of_adam["exp_avg"].numel()
        codes = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for _ in range(2)]
        content["base_optimizer_state"]["state"][1] = {"step": STEPS, "__bnb_optimizer_quant_state__": {
            "state1": codes[0], "qmap1": signed, "absmax1": torch.tensor([0.5]),
            "state2": codes[1], "qmap2": unsigned, "absmax2": torch.tensor([2.0])}}
        written.append((signed[codes[0].int()] * 0.5, unsigned[codes[1].int()] * 2.0))

    for rank in range(WORLD):
        _change(folder, rank, encode)
    found = strata._C.TrainingCheckpoint(import_deepspeed(folder, tmp_path / "out"))
    plain = strata._C.TrainingCheckpoint(import_deepspeed(saved[0] / "1-fp32", tmp_path / "plain"))
    model = torch.load(folder / f"global_step{STEPS}" / "mp_rank_00_model_states.pt", weights_only=False)
    for kind, parts in zip(("exp_avg", "exp_avg_sq"), zip(*written)):
        flat, at = torch.cat(parts), 0
        for name, shape in model["param_shapes"][1].items():
            assert torch.equal(found.read("parameter", name, kind).flatten(), flat[at : at + shape.numel()]), name
            at += shape.numel()
    assert json.loads(found.training)["optimizer_steps"] == json.loads(plain.training)["optimizer_steps"]


# --- universal checkpoints, as DeepSpeed will write them: its converter of 0.19 fails for Muon ---


def test_a_universal_checkpoint_has_a_file_for_the_momentum(saved, imported, tmp_path):
    case = CASES[0]
    checkpoint = strata._C.TrainingCheckpoint(str(imported / name_of(case) / f"global_step{STEPS}"))
    source = saved[0] / name_of(case) / f"global_step{STEPS}"
    folder = tmp_path / "universal" / f"global_step{STEPS}"
    folder.mkdir(parents=True)
    shutil.copy(source / "mp_rank_00_model_states.pt", folder)
    for role, name, *_ in checkpoint.tensors():
        there = folder / "zero" / name
        there.mkdir(parents=True)
        for kind in [kind for kind in checkpoint.kinds if checkpoint.has(name, kind)]:
            values = {"param": checkpoint.read(role, name, kind)}
            torch.save(values, there / f"{'fp32' if kind == 'value' else kind}.pt")
    path = import_deepspeed(tmp_path / "universal", tmp_path / "out", tag=f"global_step{STEPS}")
    found = strata._C.TrainingCheckpoint(path)
    for role, name, *_ in checkpoint.tensors():
        for kind in checkpoint.kinds:
            assert found.has(name, kind) == checkpoint.has(name, kind)
            if found.has(name, kind):
                assert torch.equal(found.read(role, name, kind), checkpoint.read(role, name, kind)), (name, kind)
    assert json.loads(found.training)["optimizer_steps"] == {"all": STEPS, "missed": {}}


def _with_other_matrices(folder):
    engine = make_engine(strata, CASES[0], change=lambda model: setattr(model.layers[0].weight, "use_muon", False))
    text = "has momentum_buffer of 'layers.0.weight', and this optimizer updates it with exp_avg, exp_avg_sq"
    with pytest.raises(strata.UsageError, match=text):
        engine.load_checkpoint(f"{folder}/{name_of(CASES[0])}")
    assert engine.global_steps == 0
    engine.load_checkpoint(f"{folder}/{name_of(CASES[0])}", load_optimizer_states=False)
    assert engine.global_steps == STEPS
    engine.destroy()


def test_momentum_is_not_dropped_for_a_parameter_of_another_rule(imported):
    run_ranks(2, _with_other_matrices, str(imported))
