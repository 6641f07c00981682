"""Convolutions whose weights are channels_last at `initialize`: they keep the format, values are the same bits as in
plain torch with channels_last, and what is read, written, saved and loaded has the order of the dimensions."""

import copy
import io
import itertools
import json
import logging
from contextlib import contextmanager

import pytest
import strata
import torch
from comparison import adamw
from devices import test_device
from plain_torch import PlainTrainer
from ranks import run_ranks
from safetensors.torch import load_file
from soak import also
from strata.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from test_command_line import report
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, make_engine, make_model, rank_and_world, same_bits, train_step,
)
from torch import nn
from training_states import errors_into

STEPS = 3
LABELS = 5


class Convolutions(nn.Module):
    """Over images, then over volumes. The strides of ``point`` and ``depth`` are ambiguous: a dimension is 1."""

    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)
        self.point = nn.Conv2d(8, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.strided = nn.Conv2d(8, 8, 3, stride=2)
        self.volume = nn.Conv3d(4, 6, (1, 3, 3))
        self.head = nn.Linear(6, LABELS)
        self.formats = []

    def forward(self, images):
        hidden = self.norm(self.image(images.to(self.head.weight.dtype)))
        hidden = self.strided(torch.relu(self.depth(self.point(hidden))))
        cubes = hidden.unflatten(1, (4, 2)).contiguous(memory_format=torch.channels_last_3d)
        output = self.volume(cubes)
        self.formats.append(hidden.is_contiguous(memory_format=torch.channels_last)
                            and output.is_contiguous(memory_format=torch.channels_last_3d))
        return self.head(output.mean((2, 3, 4)))


def _loss_of(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def _make(channels_last):
    model = make_model(Convolutions)
    if channels_last:
        for module in (model.image, model.point, model.depth, model.strided):
            module.to(memory_format=torch.channels_last)
        model.volume.to(memory_format=torch.channels_last_3d)
        assert not any(m.weight.is_contiguous() for m in (model.image, model.strided, model.volume))
    return model


def _make_batches(world):
    """[step][rank]: images in channels_last, and labels."""
    generator = torch.Generator().manual_seed(3)
    shape = (STEPS, world, 4, 3, 11, 11)
    images = torch.randn(shape, generator=generator).to(test_device())
    labels = torch.randint(0, LABELS, shape[:3], generator=generator).to(test_device())
    return [[(image.contiguous(memory_format=torch.channels_last), label) for image, label in zip(*of_step)]
            for of_step in zip(images, labels)]


@contextmanager
def _warnings():
    """A list of what the logger warns of."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("strata")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _told(said):
    return [line for line in said if "permuted strides" in line]


def _strides(model):
    """{name: strides} of the parameters, gathered."""
    with strata.zero.GatheredParameters(list(model.parameters())):
        return {name: p.stride() for name, p in model.named_parameters()}


def _trained(engine, world, dtype, batches, rank):
    reference = PlainTrainer(_make(True), world, adamw, DTYPES[dtype])
    assert not reference.model.volume.weight.is_contiguous(), "the reference has lost the format itself"
    for batch in batches:
        train_step(engine, batch[rank], _loss_of)
        reference.micro_step(batch, _loss_of)
        reference.step()
    return reference


def _trains(folder):
    rank, world = rank_and_world()
    batches = _make_batches(world)
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            where = f"stage {stage}, {dtype}"
            config = config_of(stage, dtype, live_bytes=1)
            with _warnings() as said:
                engine = make_engine(_make(True), config)
            assert _told(said) == [], said
            wanted = {name: p.stride() for name, p in _make(True).named_parameters()}
            assert _strides(engine.module) == wanted, where
            reference = _trained(engine, world, dtype, batches, rank)
            wrong = differences(full_parameters(engine.module), reference.values())
            assert wrong == [], f"{where}: {wrong}"
            assert engine.module.formats == [True] * STEPS, where
            assert _strides(engine.module) == wanted, where
            _exchange_checkpoints(engine, config, str(folder / f"{stage}{dtype}"), batches[0][rank])


def _exchange_checkpoints(first, config, folder, batch):
    """From a model in channels_last to a contiguous one and back; ends the engines."""
    first.save_checkpoint(f"{folder}-from-channels-last")
    train_step(first, batch, _loss_of)
    wanted = full_parameters(first.module)
    first.destroy()
    second = make_engine(_make(False), config)
    second.load_checkpoint(f"{folder}-from-channels-last")
    second.save_checkpoint(f"{folder}-from-contiguous")
    third = make_engine(_make(True), config)
    third.load_checkpoint(f"{folder}-from-contiguous")
    fourth = make_engine(_make(True), config)
    fourth.load_checkpoint(f"{folder}-from-channels-last")
    for engine in (second, third, fourth):
        train_step(engine, batch, _loss_of)
        assert differences(full_parameters(engine.module), wanted) == []
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_convolutions_in_channels_last_train_as_in_torch_and_exchange_checkpoints(world, tmp_path):
    run_ranks(world, _trains, tmp_path)


def _values(engine):
    """{name: (weight, master, exp_avg)}, whole."""
    weights = full_parameters(engine.module)
    get = strata.utils.safe_get_full_optimizer_state
    return {name: (weights[name], strata.utils.safe_get_full_fp32_param(p), get(p, "exp_avg"))
            for name, p in engine.module.named_parameters()}  # fmt: skip


def _same(ours, theirs):
    return [n for n in theirs for one, other in zip(ours[n], theirs[n], strict=True) if not same_bits(one, other)]


def _saves(folder, stage):
    rank, _ = rank_and_world()
    saves_whole = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(_make(True), config_of(stage, "bf16", live_bytes=1, zero_optimization=saves_whole))
    for batch in _make_batches(2)[:2]:
        train_step(engine, batch[rank], _loss_of)
    engine.save_checkpoint(str(folder / "run"))
    engine.save_pretrained(str(folder / "weights"))
    engine.save_16bit_model(str(folder / "whole"))
    return {name: tuple(t.cpu() for t in each) for name, each in _values(engine).items()}


def _loads(folder, stage, channels_last, found):
    engine = make_engine(_make(channels_last), config_of(stage, "bf16", live_bytes=1))
    engine.load_checkpoint(str(folder / "run"))
    assert _same(_values(engine), found) == []
    engine.destroy()
    engine = make_engine(_make(channels_last), config_of(stage, "bf16", live_bytes=1))
    with torch.no_grad(), strata.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for p in engine.module.parameters():
            p.zero_()
    strata.load_weights(engine, str(folder / "weights"))
    weights = full_parameters(engine.module)
    assert [n for n, each in found.items() if not same_bits(weights[n], each[0])] == []
    engine.destroy()


@pytest.mark.parametrize("stage", [3, *also(1)])
def test_what_is_saved_has_the_order_of_the_dimensions_and_loads_into_either_format(tmp_path, stage):
    found = run_ranks(2, _saves, tmp_path, stage)[0]
    parameters = dict(_make(False).named_parameters())
    written = [load_file(tmp_path / "weights/model.safetensors"), torch.load(tmp_path / "whole/pytorch_model.bin")]
    report("consolidate", tmp_path / "run", tmp_path / "merged")
    written.append(load_file(tmp_path / "merged/model.safetensors"))
    for weights in written:
        assert [n for n in parameters if not same_bits(weights[n], found[n][0])] == []
    masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert [n for n in parameters if not same_bits(masters[n], found[n][1])] == []
    assert report("diff", tmp_path / "run", tmp_path / "weights")["equal"]
    tensors = {t["name"]: t for t in json.loads((tmp_path / "run/global_step2/manifest.json").read_text())["tensors"]}
    assert {n for n, t in tensors.items() if "memory_format" in t} == {"image.weight", "strided.weight",
                                                                       "volume.weight"}
    for world, to_stage, channels_last in itertools.product((1, 3), (0, 3), (True, False)):
        run_ranks(world, _loads, tmp_path, to_stage, channels_last, found)


def test_a_checkpoint_of_contiguous_weights_says_nothing_of_formats(tmp_path):
    engine = make_engine(_make(False), config_of(2))
    engine.save_checkpoint(str(tmp_path))
    text = (tmp_path / "global_step0/manifest.json").read_text()
    assert "memory_format" not in text and json.loads(text)["version"] == 1


def _accesses():
    rank, world = rank_and_world()
    batches = _make_batches(world)
    for stage in range(4):
        engine = make_engine(_make(True), config_of(stage, live_bytes=1))
        reference = _trained(engine, world, "fp32", batches[:2], rank)
        values = reference.values()
        state = {n: reference.optimizer.state[p] for n, p in zip(values, reference.masters, strict=True)}
        found = _values(engine)
        for name, (_, master, exp_avg) in found.items():
            assert same_bits(master, values[name]), (stage, name)
            assert same_bits(exp_avg, state[name]["exp_avg"]), (stage, name)
        _sets_states(engine)
        if world == 1:
            _keeps_optimizer_states(engine)
        _reads_gradients(engine, batches[2][rank], stage, world)
        engine.destroy()
        if stage < 3:
            assert engine.module.image.weight.stride() == _make(True).image.weight.stride()


def _reads_gradients(engine, batch, stage, world):
    loss = _loss_of(engine, batch)
    engine.backward(loss)
    for name, p in engine.module.named_parameters():
        whole = strata.utils.safe_get_full_grad(p)
        if stage < 3 or world == 1:
            assert same_bits(p.grad, whole), (stage, name)
            assert p.grad.stride() == dict(_make(True).named_parameters())[name].stride(), (stage, name)
            p.grad.mul_(2.0)
            assert same_bits(strata.utils.safe_get_full_grad(p), whole * 2), (stage, name)
    engine.zero_grad()


def _sets_states(engine):
    image = dict(engine.module.named_parameters())["image.weight"]  # a look by its module would gather it
    wanted = torch.arange(8 * 3 * 3 * 3, dtype=torch.float32, device=test_device()).view(8, 3, 3, 3)
    strata.utils.safe_set_full_fp32_param(image, wanted)
    strata.utils.safe_set_full_optimizer_state(image, wanted + 1, "exp_avg")
    assert same_bits(_values(engine)["image.weight"][1], wanted)
    assert same_bits(_values(engine)["image.weight"][2], wanted + 1)
    assert same_bits(full_parameters(engine.module)["image.weight"], wanted)
    whole = engine.module_state_dict()
    assert whole is None or same_bits(whole["image.weight"], wanted)
    with torch.no_grad(), strata.zero.GatheredParameters([image], modifier_rank=0):
        image.copy_(wanted + 2)
        file = io.BytesIO()
        torch.save(image.detach(), file)
        assert file.tell() < image.nbytes + 3000
        file.seek(0)
        assert torch.equal(torch.load(file), wanted + 2)
    assert same_bits(full_parameters(engine.module)["image.weight"], wanted + 2)


def _keeps_optimizer_states(engine):
    state = copy.deepcopy(engine.optimizer.state_dict())
    before = _values(engine)
    names = [n for n, _ in engine.module.named_parameters()]
    assert same_bits(state["state"][names.index("image.weight")]["exp_avg"], before["image.weight"][2])
    image = dict(engine.module.named_parameters())["image.weight"]
    strata.utils.safe_set_full_optimizer_state(image, torch.zeros(8, 3, 3, 3), "exp_avg")
    engine.optimizer.load_state_dict(state)
    assert _same(_values(engine), before) == []


@pytest.mark.parametrize("world", [1, 2])
def test_values_states_and_gradients_are_read_and_set_in_the_order_of_the_dimensions(world):
    run_ranks(world, _accesses)


class _OfRows(torch.optim.SGD):
    """Its step divides by the norm of the first dimension's slices, so it needs whole parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("kept", torch.zeros_like(p)).add_(p.grad)
                rows = kept.reshape(len(p), -1)
                p.sub_((rows / (rows.norm(dim=1, keepdim=True) + 1e-3)).view(p.shape), alpha=group["lr"])


def _takes_whole(folder):
    rank, world = rank_and_world()
    rule = lambda parameters: _OfRows(parameters, lr=0.01)  # noqa: E731
    batches, model = _make_batches(world), _make(True)
    config = config_of(0, optimizer=False)
    engine = make_engine(model, config, optimizer=rule(model.parameters()))
    reference = PlainTrainer(_make(True), world, rule)
    for batch in batches[:2]:
        train_step(engine, batch[rank], _loss_of)
        reference.micro_step(batch, _loss_of)
        reference.step()
    for name, value in full_parameters(engine.module).items():  # norms are summed in the order of the memory
        torch.testing.assert_close(value, reference.values()[name], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(folder))
    wanted = strata.utils.safe_get_full_optimizer_state(engine.module.image.weight, "kept").clone()
    engine.destroy()
    for channels_last in (True, False):
        model = _make(channels_last)
        engine = make_engine(model, config, optimizer=rule(model.parameters()))
        engine.load_checkpoint(str(folder))
        assert same_bits(strata.utils.safe_get_full_optimizer_state(engine.module.image.weight, "kept"), wanted)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_of_whole_parameters_sees_their_shape(world, tmp_path):
    run_ranks(world, _takes_whole, tmp_path)


def test_a_second_engine_takes_the_format_over():
    first = make_engine(_make(True), config_of(3, live_bytes=1))
    wanted = full_parameters(first.module)
    second = make_engine(first.module, config_of(3, live_bytes=1))
    assert differences(full_parameters(second.module), wanted) == []
    with strata.zero.GatheredParameters([second.module.image.weight]):
        assert second.module.image.weight.is_contiguous(memory_format=torch.channels_last)
    second.destroy()


def test_other_permuted_strides_are_lost_which_is_said():
    with _warnings() as said:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(test_device())
        model[1].weight = nn.Parameter(torch.ones(4, 2, device=test_device()).t())
        make_engine(model, config_of(1)).destroy()
    [text] = _told(said)
    assert "'1.weight' has permuted strides (1, 2); the engine keeps" in text and "Convolution" not in text, text


def _converts_late(folder):
    rank, world = rank_and_world()
    engine = make_engine(_make(False), config_of(1))
    batches = _make_batches(world)
    reference = PlainTrainer(_make(True), world, adamw)
    told = folder / str(rank)
    with errors_into(told):
        for batch in batches:
            engine.module.image.to(memory_format=torch.channels_last)
            train_step(engine, batch[rank], _loss_of)
            reference.micro_step(batch, _loss_of)
            reference.step()
    assert differences(full_parameters(engine.module), reference.values()) == []
    assert engine.module.image.weight.is_contiguous()
    text = told.read_text()
    assert text.count("'image.weight' was converted") == (1 if rank == 0 else 0), text
    assert rank > 0 or "it stays contiguous" in text, text
    engine.destroy()


def test_a_format_that_is_set_after_initialize_is_undone_and_told_once(tmp_path):
    run_ranks(2, _converts_late, tmp_path)
