"""Names that scripts read on the engine, and states of single parameters, against plain torch: stages 0 to 3."""

import argparse
import inspect

import pytest
import strata
import torch
from comparison import adamw
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from strata import utils
from tiny_models import (
    config_of,
    differences,
    full_parameters,
    loss_of,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    same_bits,
    train_step,
)

STAGES = (0, 1, 2, 3)
SAVES = {"stage3_gather_16bit_weights_on_model_save": True}


def _told(call, *args, **kwargs):
    with pytest.raises(strata.Error) as told:
        call(*args, **kwargs)
    return str(told.value)


def _names_at(stage):
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(
        stage, "bf16", accumulation=2, clipping=0.5, communication_data_type="bf16", steps_per_print=7,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}))
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.fp16_auto_cast()) == (False, True, False)
    assert engine.zero_optimization() == (stage > 0)
    assert engine.zero_optimization_partition_gradients() == (stage > 1)
    assert engine.zero_optimization_partition_weights() == (stage > 2)
    assert engine.zero_reduce_bucket_size() == 500_000_000 and engine.zero_max_reuse_distance() is None
    assert engine.optimizer_name() == "AdamW" and engine.scheduler_name() == "WarmupLR"
    assert engine.optimizer_params()["weight_decay"] == 0.1 and engine.optimizer_params()["eps"] == 1e-8
    assert engine.scheduler_params()["warmup_max_lr"] == 0.5
    assert (engine.gradient_clipping(), engine.loss_scale(), engine.steps_per_print()) == (0.5, 1.0, 7)
    assert engine.communication_data_type is torch.bfloat16 and not engine.dynamic_loss_scale()
    assert not engine.wall_clock_breakdown() and engine.zero_offload_param() is None
    assert (engine.dp_world_size, engine.get_data_parallel_rank(), engine.local_rank) == (world, rank, rank)
    assert engine.get_mom() == [(0.9, 0.999)] and engine.get_type() == [None]
    assert engine.managed_gradient_accumulation() and not engine.amp_enabled()
    assert (engine.zero_sub_group_size(), engine.torch_autocast_lower_precision_safe_modules()) == (1_000_000_000, None)
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    stranger = {"params": [torch.nn.Parameter(torch.ones(2))]}
    assert "parameters of the engine's model" in _told(engine.optimizer.add_param_group, stranger)
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125] == [group["lr"] for group in engine.optimizer.param_groups]
    assert "lp_params" in _told(engine.offload_states, include=["weights"])
    assert "device=" in _told(engine.offload_states, device="nvme")
    engine.reload_states()
    assert "save_latest" in inspect.signature(engine.save_checkpoint).parameters
    engine.empty_partition_cache()
    engine.destroy()
    without = make_engine(make_model(), config_of(
        stage, optimizer=False, managed_gradient_accumulation=False,
        zero_optimization={"stage": stage, "sub_group_size": 5},
        torch_autocast={"lower_precision_safe_modules": ["torch.nn.Linear"]}))
    assert without.get_lr() == without.get_mom() == without.get_type() == []
    assert "this engine has no optimizer" in _told(without.set_lr, 0.1)
    assert not without.managed_gradient_accumulation() and without.zero_sub_group_size() == 5
    assert without.torch_autocast_lower_precision_safe_modules() == ["torch.nn.Linear"]
    assert without.get_data_types() == (torch.float32, torch.float32)
    without.destroy()


def _batches_at(stage):
    """Other batch sizes while it trains, beside plain torch."""
    rank, world = rank_and_world()
    reference = PlainTrainer(make_model(), world, adamw)
    engine = make_engine(make_model(), config_of(stage))
    batches = iter(make_batches(6, world))
    for steps in (1, 2, 3):
        engine.set_train_batch_size(4 * world * steps)
        assert engine.get_batch_info() == (4 * world * steps, 4, steps)
        reference.accumulation = steps
        for _ in range(steps):
            tokens = next(batches)
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
        reference.step()
    assert engine.global_samples == 6 * 4 * world and engine.global_steps == 3
    assert f"give a multiple of {4 * world}; found 6" in _told(engine.set_train_batch_size, 6)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (2 * world * 3, 2, 3) and engine.global_samples == 6 * 4 * world
    assert differences(full_parameters(engine.module), reference.values()) == []
    engine.destroy()


def _weights_at(stage, folder):
    rank, world = rank_and_world()
    model = make_model()
    model.layers[0].up.bias.requires_grad_(False)
    engine = make_engine(model, config_of(stage))
    if stage == 3:
        assert engine.save_16bit_model(folder) is False
        engine.destroy(keep_values=True)
        engine = make_engine(model, config_of(stage, zero_optimization={"stage": 3, **SAVES}))
    train_step(engine, make_batches(1, world)[0][rank])
    expected = {**full_parameters(model), **{n: b.clone() for n, b in model.named_buffers()}}
    assert engine.save_16bit_model(folder, "all.bin") is True
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True) is True
    if rank == 0:
        saved = torch.load(f"{folder}/all.bin")
        assert differences(saved, {n: v.cpu() for n, v in expected.items() if n in saved}) == []
        assert set(make_model().state_dict()) == set(saved)
        assert set(saved) - set(torch.load(f"{folder}/trained.bin")) == {"layers.0.up.bias"}
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    assert (consolidated is not None) == (rank == 0)
    whole = {name: value.clone() for name, value in engine.module_state_dict().items()}
    assert all(torch.equal(whole[n].cpu(), expected[n].cpu()) for n in whole)
    assert set(whole) == set(make_model().state_dict())
    changed = {n: v + rank + 1 for n, v in whole.items()}
    assert engine.load_module_state_dict(changed) == ([], [])
    assert all(torch.equal(v, (whole[n] + 1).to(v)) for n, v in full_parameters(model).items())
    del changed["head.weight"]
    assert "missing ['head.weight']" in _told(engine.load_module_state_dict, {**changed})
    assert engine.load_module_state_dict(changed, strict=False).missing_keys == ["head.weight"]
    assert "another shape" in _told(engine.load_module_state_dict, {"head.bias": torch.zeros(3)}, strict=False)
    found = engine.state_dict()
    assert set(found) == (set(whole) if rank == 0 or stage < 3 else set())
    assert all(torch.equal(found[n].cpu(), value.cpu()) for n, value in full_parameters(model).items() if n in found)
    assert engine.load_state_dict({f"module.{n}": v - 2 for n, v in whole.items()} if rank == 0 else {}) == ([], [])
    assert all(torch.equal(v, (whole[n] - 2).to(v)) for n, v in full_parameters(model).items())
    assert all(torch.equal(v.cpu(), whole[n].cpu() - 2) for n, v in model.named_buffers() if n in whole)
    assert "missing" in _told(engine.load_state_dict, {"head.bias": whole["head.bias"]})
    assert "leave it out" in _told(engine.load_state_dict, whole, assign=True)
    if rank == 0:
        with open(f"{folder}/file", "w", encoding="utf-8") as file:
            file.write("no folder")
    assert "cannot write" in _told(engine.save_16bit_model, f"{folder}/file")
    engine.destroy()


def _each(function, *args):
    for stage in STAGES:
        function(stage, *args)


def _all(folder):
    _each(_names_at)
    _each(_batches_at)
    _each(_weights_at, folder)


@pytest.mark.parametrize("world", [1, 2])
def test_what_scripts_read_on_the_engine(world, tmp_path):
    run_ranks(world, _all, str(tmp_path))


# --- states of single parameters ---


def _states_at(stage, dtype):
    """The functions read the values that plain torch has after the same steps, and training uses the values they
    set."""
    rank, world = rank_and_world()
    model = make_model()
    model.layers[0].up.bias.requires_grad_(False)
    reference = PlainTrainer(model, world, adamw)
    engine = make_engine(model, config_of(stage, dtype))
    name, weight = "layers.1.up.weight", model.layers[1].up.weight
    index = [n for n, p in reference.model.named_parameters() if p.requires_grad].index(name)
    theirs = reference.masters[index]
    assert utils.safe_get_full_grad(weight) is None and utils.safe_get_full_fp32_param(theirs) is None
    assert utils.safe_get_full_fp32_param(model.layers[0].up.bias) is None
    assert "there is no gradient to set" in _told(utils.safe_set_full_grad, weight, torch.zeros(theirs.shape))
    tokens = make_batches(3, world)
    for step, batch in enumerate(tokens[:2]):
        reference.micro_step(batch, loss_of)
        engine.backward(loss_of(engine, batch[rank]))
        gradient = utils.safe_get_full_grad(weight)
        part = utils.safe_get_local_grad(weight)
        assert gradient.shape == theirs.shape and gradient.dtype == torch.float32
        if dtype == "fp32":
            assert same_bits(gradient, reference.sums[index])
        if step == 0:
            utils.safe_set_full_grad(weight, gradient * 0.5)
        else:
            utils.safe_update_full_grad_vectorized([weight, model.layers[0].up.bias], lambda g, p: g * 0.5)
        assert torch.equal(utils.safe_get_local_grad(weight), part * 0.5)
        reference.sums[index].mul_(0.5)
        engine.step()
        reference.step()
    master = utils.safe_get_full_fp32_param(weight)
    states = [utils.safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")]
    expected = reference.optimizer.state[theirs]
    if dtype == "fp32":
        assert same_bits(master, theirs) and differences(full_parameters(model), reference.values()) == []
        assert same_bits(states[0], expected["exp_avg"]) and same_bits(states[1], expected["exp_avg_sq"])
    else:
        assert torch.equal(master.bfloat16(), full_parameters(model)[name]) and not torch.equal(
            master, master.bfloat16().float())
    assert "shape" in _told(utils.safe_set_full_fp32_param, weight, torch.zeros(3))
    assert "'momentum' cannot be read" in _told(utils.safe_get_full_optimizer_state, weight, "momentum")
    # Surgery: half of everything, by whole tensors and by parts.
    utils.safe_set_full_fp32_param(weight, master * 0.3)
    local = utils.safe_get_local_fp32_param(weight)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), master * 0.3)
    utils.safe_set_local_fp32_param(weight, local * 2.0)
    assert torch.equal(utils.safe_get_full_fp32_param(weight), master * 0.3 * 2.0)
    assert torch.equal(full_parameters(model)[name], (master * 0.3 * 2.0).to(weight.dtype))
    utils.safe_set_full_optimizer_state(weight, states[0] * 3.0, "exp_avg")
    utils.safe_set_local_optimizer_state(
        weight, utils.safe_get_local_optimizer_state(weight, "exp_avg_sq") * 2.0, "exp_avg_sq")
    with torch.no_grad():
        theirs.mul_(0.3).mul_(2.0)
        reference.parameters[index].copy_(theirs)
        expected["exp_avg"].mul_(3.0)
        expected["exp_avg_sq"].mul_(2.0)
    reference.micro_step(tokens[2], loss_of)
    train_step(engine, tokens[2][rank])
    reference.step()
    if dtype == "fp32":
        assert differences(full_parameters(model), reference.values()) == []
    engine.destroy()


KEPT = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), ["momentum_buffer"]),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=False),
                ["square_avg", "momentum_buffer"]),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, foreach=False), ["sum"]),
}


def _states_of_the_users_at(stage):
    """As ``_states_at``, of optimizers that keep their states by segments of the shards."""
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    for make, keys in KEPT.values():
        model = make_model()
        model.layers[0].up.bias.requires_grad_(False)
        reference = PlainTrainer(model, world, make)
        trainable = [n for n, p in reference.model.named_parameters() if p.requires_grad]
        masters = dict(zip(trainable, reference.masters, strict=True))
        parameters = dict(model.named_parameters())
        engine, *_ = strata.initialize(
            model=model, config=config_of(stage, optimizer=False), optimizer=make(model.parameters()))
        for step, batch in enumerate(tokens):
            reference.micro_step(batch, loss_of)
            with exact_square_roots():
                train_step(engine, batch[rank])
            reference.step()
            for key in keys:
                local = 0
                for name, theirs in masters.items():
                    expected = reference.optimizer.state[theirs][key]
                    assert torch.equal(utils.safe_get_full_optimizer_state(parameters[name], key), expected), name
                    local += utils.safe_get_local_optimizer_state(parameters[name], key).numel()
                assert world > 1 or local == sum(theirs.numel() for theirs in masters.values())
            if step == 0:  # surgery on one by its whole, on one by its parts
                for name, setter, getter in (
                    ("layers.1.up.weight", utils.safe_set_full_optimizer_state, utils.safe_get_full_optimizer_state),
                    ("head.weight", utils.safe_set_local_optimizer_state, utils.safe_get_local_optimizer_state),
                ):
                    setter(parameters[name], getter(parameters[name], keys[0]) * 2.0, keys[0])
                    reference.optimizer.state[masters[name]][keys[0]].mul_(2.0)
        assert differences(full_parameters(model), reference.values()) == []
        weight, frozen = model.head.weight, model.layers[0].up.bias
        for key in ("step", "exp_avg", "none"):
            assert utils.safe_get_full_optimizer_state(weight, key) is None, key
            assert utils.safe_get_local_optimizer_state(weight, key) is None, key
        assert utils.safe_get_full_optimizer_state(frozen, keys[0]) is None
        assert "found [3]" in _told(utils.safe_set_full_optimizer_state, weight, torch.zeros(3), keys[0])
        part = utils.safe_get_local_optimizer_state(weight, keys[0])
        assert f"has {part.numel()} elements; found {part.numel() + 1}" in _told(
            utils.safe_set_local_optimizer_state, weight, torch.zeros(part.numel() + 1), keys[0])
        if part.numel() > 0:
            whole = torch.zeros(weight.ds_shape if stage == 3 else weight.shape)
            assert "there is no exp_avg to set" in _told(
                utils.safe_set_full_optimizer_state, weight, whole, "exp_avg")
        engine.destroy()


def _states():
    _each(_states_of_the_users_at)
    for dtype in ("fp32", "bf16"):
        _each(_states_at, dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_states_of_parameters_are_read_and_set(world):
    run_ranks(world, _states)


def test_arguments_of_the_command_line(tmp_path):
    parser = strata.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert args.deepspeed and args.deepspeed_config == "x.json"
    assert parser.parse_args([]).deepspeed_config is None


def test_a_repeating_loader_begins_again():
    loader = utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2


def _samples_where_the_script_counts():
    rank, world = rank_and_world()
    config = config_of(1, managed_gradient_accumulation=False, train_micro_batch_size_per_gpu=1)
    engine = make_engine(make_model(), config)
    tokens = make_batches(5, world)
    found = []
    for passes in ((0, 1), (2, 3, 4)):
        for index in passes:
            engine.backward(loss_of(engine, tokens[index, rank, :1]))
        engine.step()
        found.append(engine.global_samples)
    assert found == [2 * world, 5 * world] and engine.micro_steps == 2
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_samples_are_those_of_the_passes_where_the_script_counts(world):
    run_ranks(world, _samples_where_the_script_counts)
