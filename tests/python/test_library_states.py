"""States of bitsandbytes, torchao, torch's Muon and others like it go into the engine, and out by their names."""

import runpy
from pathlib import Path

import pytest
import strata
import torch
from ranks import run_ranks
from strata.checkpoint.library_states import Numbers, engine_states, map8
from strata.exporting.deepspeed import export_deepspeed
from strata.importing.dcp import import_dcp
from strata.importing.whole_tensors import load_tensors
from strata.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from strata.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from test_command_line import report
from test_whole_parameters import Lamb
from tiny_models import config_of, full_parameters, make_engine, rank_and_world, train_step

HERE = Path(__file__).parent / "library_states"  # with files that the libraries themselves have written
MADE = runpy.run_path(str(HERE / "make.py"))
WEIGHTS = {"bitsandbytes-adamw": "AdamW8bit", "bitsandbytes-lion": "Lion8bit", "torchao-adamw": "AdamW8bit"}


class Model(torch.nn.Module):
    """``make_linear()``, whose loss has any gradients."""

    def __init__(self):
        super().__init__()
        linear = MADE["make_linear"]()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, weight, bias):
        inputs = torch.cat([torch.eye(weight.shape[1]), torch.zeros(1, weight.shape[1])])
        outputs = torch.nn.functional.linear(inputs, self.weight, self.bias)
        return (outputs * torch.cat([weight.T, (bias - weight.sum(1)).unsqueeze(0)])).sum()


def _engine(name, stage=3, **settings):
    params = {**MADE["LION" if "Lion" in name else "SETTINGS"], **settings}
    config = config_of(stage, optimizer=False) | {"optimizer": {"type": name, "params": params}}
    return make_engine(Model(), config)


def _load_weights(engine, values):
    with strata.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(values[name])


def _step(engine, step):
    train_step(engine, MADE["gradients_of"](step), lambda module, gradients: module(*gradients))


def _codes(state):
    """{(state, "codes" or "scales"): tensor} of the weight, of either library."""
    state = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
    if "state1" in state:
        names = {"1": "exp_avg", "2": "exp_avg_sq"}
        return {(names[n], kind): state[f"{key}{n}"].flatten() for n in "12" if f"state{n}" in state
                for kind, key in (("codes", "state"), ("scales", "absmax"))}  # fmt: skip
    return {(name, kind): getattr(state[name], key).flatten() for name in ("exp_avg", "exp_avg_sq")
            for kind, key in (("codes", "codes"), ("scales", "scale"))}


def _assert_codes(engine, expected):
    """Compares this rank's part bit for bit."""
    names = {name: index for index, (name, *_) in enumerate(engine._described)}
    index = names["weight"]
    first, last = strata._C.state_range(engine.core, index)
    for state in {state for state, _ in expected}:
        codes, scales = strata._C.read_codes(engine.core, index, state)
        assert torch.equal(codes, expected[state, "codes"][first:last]), state
        assert torch.equal(scales, expected[state, "scales"][first // 256 : -(-last // 256)]), state


def _taken(name):
    saved = load_tensors(str(HERE / f"{name}.pt"))
    engine = _engine(WEIGHTS[name])
    _load_weights(engine, saved["model"])
    engine.optimizer.load_state_dict(saved["optimizer"])
    expected = _codes(saved["optimizer"]["state"][0])
    _assert_codes(engine, expected)
    if rank_and_world()[1] == 1:
        exported = engine.optimizer.state_dict()["state"]
        assert _codes(exported[0]).keys() == expected.keys() and exported[0]["step"] == 2
        for key, value in _codes(exported[0]).items():
            assert torch.equal(value, expected[key]), key
        assert exported[0]["state1"].shape == (MADE["ROWS"], MADE["COLUMNS"])
        assert exported[1]["state1"].dtype == torch.float32 and exported[1].keys() <= {"step", "state1", "state2"}
    moment = safe_get_full_optimizer_state(engine.module.weight, "exp_avg").flatten()
    codes, scales = expected["exp_avg", "codes"], expected["exp_avg", "scales"]
    assert torch.equal(moment, map8(True)[codes.int()] * scales.repeat_interleave(256))
    _step(engine, 2)
    after = load_tensors(str(HERE / f"{name}-next.pt"))
    for key, value in full_parameters(engine.module).items():
        torch.testing.assert_close(value, after[key], rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
    engine.destroy()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_and_scales_go_in_and_out_bit_for_bit(name, ranks):
    """And the next step is the library's."""
    run_ranks(ranks, _taken, name)


def _numbers(name):
    saved = load_tensors(str(HERE / f"{name}.pt"))
    engine = _engine("AdamW")
    engine.optimizer.load_state_dict(saved["optimizer"])
    found = engine.optimizer.state_dict()["state"]
    for (state, kind), codes in _codes(saved["optimizer"]["state"][0]).items():
        if kind == "codes":
            scales = _codes(saved["optimizer"]["state"][0])[state, "scales"].repeat_interleave(256)
            expected = map8(state == "exp_avg")[codes.int()] * scales
            assert torch.equal(found[0][state].flatten(), expected), state
    assert found[0]["step"] == 2 and torch.equal(
        found[1]["exp_avg"], engine_states(saved["optimizer"]["state"][1], {}, "bias")["exp_avg"])
    engine.destroy()


@pytest.mark.parametrize("name", ["bitsandbytes-adamw", "torchao-adamw"])
def test_an_optimizer_of_32_bits_gets_the_numbers(name):
    run_ranks(1, _numbers, name)


def _of_dcp(folder, expected):
    engine = _engine("AdamW8bit")
    engine.load_checkpoint(folder)
    _assert_codes(engine, expected)
    engine.destroy()


@pytest.mark.parametrize("name", ["bitsandbytes-adamw", "torchao-adamw"])
def test_folders_of_dcp_with_states_of_8_bits_are_imported(name, tmp_path):
    import_dcp(HERE / f"{name}-dcp", tmp_path)
    expected = _codes(load_tensors(str(HERE / f"{name}.pt"))["optimizer"]["state"][0])
    checkpoint = strata._C.TrainingCheckpoint(str(tmp_path / f"{name}-dcp"))
    assert checkpoint.dtype_of("weight", "exp_avg_sq") == torch.float32
    run_ranks(2, _of_dcp, str(tmp_path), expected)


def _two_checkpoints(folder):
    engine = _engine("AdamW8bit")
    for step in range(2):
        _step(engine, step)
        engine.save_checkpoint(folder, tag=f"after {step + 1}")
    engine.destroy()


def test_checkpoints_with_states_of_8_bits_are_compared(tmp_path):
    run_ranks(2, _two_checkpoints, str(tmp_path))
    one, other = (str(tmp_path / f"after {n}") for n in (1, 2))
    same = report("diff", one, one, "--kinds")
    assert same["equal"] and same["tensors"] == 8
    assert get_fp32_state_dict_from_zero_checkpoint(one)["weight"].shape == (MADE["ROWS"], MADE["COLUMNS"])
    path = export_deepspeed(one, tmp_path / "out", world_size=1, stage=2)  # as numbers
    exported = torch.load(f"{path}/zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    moment = exported["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    expected = strata._C.TrainingCheckpoint(one).read("parameter", "weight", "exp_avg")
    assert torch.equal(moment[: expected.numel()].view_as(expected), expected) and expected.any()
    told = report("diff", one, other, "--kinds", "--top", "8", code=1)
    found = {(entry["name"], entry["kind"]): entry for entry in told["largest"]}
    assert found["weight", "exp_avg_sq.scales"]["elements"] == 17 and ("weight", "exp_avg") in found


# --- Muon: the average is kept, and some libraries keep the sum ---

MUON = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}


class _Keller(torch.optim.Optimizer):
    """With the groups and states of Keller Jordan's class."""

    def __init__(self, muon, adam):
        of_adam = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
        of_muon = {"params": muon, "use_muon": True, **MUON}
        super().__init__([of_muon, {"params": adam, "use_muon": False, **of_adam}], {})


_Keller.__name__ = "SingleDeviceMuonWithAuxAdam"


def _states_after_two_steps():
    """(momentum of the weight, states of the bias, {library: its state_dict of these})."""
    model = Model()
    muon = torch.optim.Muon([model.weight], **MUON)
    adam = torch.optim.AdamW([model.bias], lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(2):
        model.weight.grad, model.bias.grad = MADE["gradients_of"](step)
        muon.step()
        adam.step()
    momentum, moments = muon.state[model.weight]["momentum_buffer"], adam.state[model.bias]
    groups = _Keller([model.weight], [model.bias]).state_dict()["param_groups"]
    of_adam = {"step": 2, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
    moonlight = {0: {"use_muon": True, "momentum_buffer": momentum / (1 - 0.9)},
                 1: {"use_muon": False, "step": 2, "moment1": of_adam["exp_avg"], "moment2": of_adam["exp_avg_sq"]}}
    dion = {0: {"momentum": momentum}, 1: {"momentum": of_adam["exp_avg"], "variance": of_adam["exp_avg_sq"]}}
    of_dion = [{**groups[0], "algorithm": "muon", "step": 2}, {**groups[1], "algorithm": "adamw", "step": 2}]
    return momentum, of_adam, {
        "Keller": {"state": {0: {"momentum_buffer": momentum}, 1: of_adam}, "param_groups": groups},
        "Moonlight": {"state": moonlight, "param_groups": groups},
        "dion": {"state": dion, "param_groups": of_dion}}


def _muon_engine(stage=3):
    model = Model()
    return make_engine(model, config_of(stage, optimizer=False), optimizer=_Keller([model.weight], [model.bias]))


def _momentum_taken():
    momentum, of_adam, by_library = _states_after_two_steps()
    for library, saved in by_library.items():
        engine = _muon_engine()
        engine.optimizer.load_state_dict(saved)
        found = safe_get_full_optimizer_state(engine.module.weight, "momentum_buffer")
        torch.testing.assert_close(found, momentum, rtol=1e-6 if library == "Moonlight" else 0, atol=0)
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(safe_get_full_optimizer_state(engine.module.bias, state), of_adam[state]), library
        if rank_and_world()[1] == 1:
            exported = engine.optimizer.state_dict()["state"]
            assert exported[1]["step"] == 2 and exported[0].keys() - {"step"} == {"momentum_buffer"}
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_momentum_of_other_libraries_becomes_the_average(world):
    run_ranks(world, _momentum_taken)


def _of_dcp_muon(folder, momentum, of_adam):
    engine = _muon_engine(2)
    engine.load_checkpoint(folder)
    assert torch.equal(safe_get_full_optimizer_state(engine.module.weight, "momentum_buffer"), momentum)
    assert torch.equal(safe_get_full_optimizer_state(engine.module.bias, "exp_avg_sq"), of_adam["exp_avg_sq"])
    assert [group["lr"] for group in engine.optimizer.param_groups] == [MUON["lr"], 1e-3]
    engine.destroy()


@pytest.mark.parametrize("flattened", [False, True])
def test_folders_of_dcp_with_torchs_muon_are_imported(flattened, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = Model()
    optimizers = [torch.optim.Muon([model.weight], **MUON),
                  torch.optim.AdamW([model.bias], lr=1e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)]
    for step in range(2):
        model.weight.grad, model.bias.grad = MADE["gradients_of"](step)
        for optimizer in optimizers:
            optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    of_model, of_optimizer = get_state_dict(model, optimizers, options=options)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "muon", no_dist=True)
    import_dcp(tmp_path / "muon", tmp_path / "out")
    momentum = optimizers[0].state[model.weight]["momentum_buffer"]
    run_ranks(2, _of_dcp_muon, str(tmp_path / "out"), momentum, optimizers[1].state[model.bias])


def _of_dcp_whole(folder, expected):
    model = Model()
    engine = make_engine(model, config_of(2, optimizer=False), optimizer=torch.optim.Adafactor(model.parameters()))
    engine.load_checkpoint(folder)
    states = {engine.core.known_name(index): values for index, _, values in engine.core.segment_states.entries()}
    for name, values in states.items():  # of the parameters that this rank owns
        assert values.keys() == expected[name].keys()
        for key, value in expected[name].items():
            assert torch.equal(torch.as_tensor(values[key]), value), (name, key)
    _step(engine, 2)
    found = full_parameters(engine.module)
    engine.destroy()
    return len(states), found


def test_folders_of_dcp_with_states_of_other_shapes_are_imported(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = Model()
    optimizer = torch.optim.Adafactor(model.parameters())
    for step in range(2):
        MADE["take_step"](model, optimizer, step)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "adafactor", no_dist=True)
    import_dcp(tmp_path / "adafactor", tmp_path / "out")
    expected = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}
    MADE["take_step"](model, optimizer, 2)
    told = run_ranks(2, _of_dcp_whole, str(tmp_path / "out"), expected)
    assert sum(count for count, _ in told) == 2
    for name, p in model.named_parameters():
        torch.testing.assert_close(told[0][1][name], p.detach(), rtol=1e-5, atol=1e-6)


# --- reading and setting by name ---


def _set_by_name(which):
    if which == "Muon":
        engine, states = _muon_engine(), {"weight": ["momentum_buffer"], "bias": ["exp_avg", "exp_avg_sq"]}
    elif which == "whole":
        model = Model()
        engine = make_engine(model, config_of(2, optimizer=False), optimizer=Lamb(model.parameters()))
        states = dict.fromkeys(("weight", "bias"), ["exp_avg", "exp_avg_sq"])
        assert engine.optimizer.takes_whole
    else:
        engine, states = _engine(which), dict.fromkeys(("weight", "bias"), ["exp_avg"])
    _step(engine, 0)
    for name, parameter in engine.module.named_parameters():
        for state in states[name]:
            found = safe_get_full_optimizer_state(parameter, state)
            value = torch.full_like(found, 0.25)  # which 8 bits hold exactly
            safe_set_full_optimizer_state(parameter, value, state)
            assert torch.equal(safe_get_full_optimizer_state(parameter, state), value), (which, name, state)
    before = full_parameters(engine.module)
    _step(engine, 1)
    assert not torch.equal(full_parameters(engine.module)["weight"], before["weight"])
    engine.destroy()


@pytest.mark.parametrize("which", ["Muon", "whole", "Lion", "Lion8bit", "AdamW8bit"])
def test_states_are_read_and_set_by_their_names(which):
    run_ranks(2, _set_by_name, which)


# --- refusals ---


def _refused():
    _, of_adam, by_library = _states_after_two_steps()
    engine = _muon_engine()
    before = engine.optimizer.state_dict()
    lacking = by_library["Keller"] | {"state": {0: {"step": 2, "exp_avg": torch.zeros(64, 68)}, 1: of_adam}}
    with pytest.raises(strata.UsageError, match="'weight' with the states momentum_buffer; found step, exp_avg"):
        engine.optimizer.load_state_dict(lacking)
    with_more = by_library["Keller"] | {"state": {1: {**of_adam, "max_exp_avg_sq": torch.ones(64)}}}
    with pytest.raises(strata.UsageError, match="'bias' with .*found step, exp_avg, exp_avg_sq, max_exp_avg_sq"):
        engine.optimizer.load_state_dict(with_more)
    assert engine.optimizer.state_dict()["state"].keys() == before["state"].keys()
    engine.destroy()


def test_states_of_another_rule_are_refused_by_name():
    run_ranks(1, _refused)


def test_states_of_other_forms_are_refused_by_name():
    codes, scales, values = torch.zeros(512, dtype=torch.uint8), torch.ones(2), map8(True)
    lacking = "'state1' of 'w' has 512 codes .* wanted with them 'qmap1' and 'absmax1'"
    cases = [
        ({"state1": codes, "qmap1": values}, {}, lacking),
        ({"state1": codes, "absmax1": torch.ones(1), "qmap1": values}, {}, "a scale for each 256"),
        ({"state1": codes, "absmax1": scales, "qmap1": torch.linspace(-1, 1, 256)}, {}, "of another map"),
        ({"state1": torch.zeros(2, 512), "state2": torch.zeros(512)}, {}, "AdEMAMix"),
        ({"exp_avg::quantized": codes}, {}, "FlashOptim"),
        ({"use_muon": True, "momentum_buffer": torch.ones(4)}, {}, "no 'momentum'"),
    ]  # fmt: skip
    for state, group, text in cases:
        with pytest.raises(strata.FormatError, match=text):
            engine_states(state, group, "'w'")

    class OptimState4bit:
        codes, scale, qmap = torch.zeros(256, dtype=torch.uint8), torch.ones(4), torch.zeros(16)
        numel = staticmethod(lambda: 512)

    with pytest.raises(strata.FormatError, match="OptimState4bit; wanted torchao's OptimState8bit"):
        engine_states({"exp_avg": OptimState4bit()}, {}, "'w'")


def test_numbers_are_read_in_parts_in_any_memory_format():
    codes = torch.arange(1200).remainder(256).to(torch.uint8)
    numbers = Numbers(codes.view(30, 40), torch.arange(1.0, 6.0))
    whole = numbers.read()
    assert whole.shape == (30, 40) and torch.equal(numbers.part(250, 700), whole.flatten()[250:700])
    assert whole.flatten()[255] == map8(True)[255] and whole.flatten()[511] == 2 * map8(True)[255]
    images = codes.view(2, 3, 4, 50).contiguous(memory_format=torch.channels_last)
    found = Numbers(images, torch.arange(1.0, 6.0)).read()
    in_memory = found.permute(0, 2, 3, 1).flatten()
    assert torch.equal(in_memory, Numbers(images.permute(0, 2, 3, 1).flatten(), torch.arange(1.0, 6.0)).read())


def test_a_folder_with_numbered_states_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad, model.bias.grad = MADE["gradients_of"](0)
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "numbered",
             no_dist=True)
    with pytest.raises(strata.FormatError, match="states of an optimizer for '0', which is none of the model's"):
        import_dcp(tmp_path / "numbered", tmp_path / "out")
