"""Tensors that share memory with a parameter keep the values that they had when the engine takes the memory away."""

import copy
import gc
import io

import pytest
import strata
import torch
from comparison import adamw
from devices import needs_a_gpu_each
from plain_torch import PlainTrainer
from ranks import run_ranks
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


def _overwrite_what_is_free():
    """Takes and overwrites memory that was given back."""
    gc.collect()
    return [torch.full((n,), 7.0) for n in (300, 600, 1200, 2400, 4800) for _ in range(50)]


def _views_of(model):
    """{way: [tensor or array]} of whole parameters."""
    parameters = [p for p in model.parameters() if p.numel() > 1]
    ways = {
        "state dict": [value for value in model.state_dict().values() if value.numel() > 1],
        "detach": [p.detach() for p in parameters],
        "data": [p.data for p in parameters],
        "view": [p.detach().view(-1)[1:] for p in parameters],
        "dlpack": [torch.utils.dlpack.from_dlpack(p.detach()) for p in parameters],
        "deepcopy": list(copy.deepcopy(model).parameters()),
        "averaged": list(torch.optim.swa_utils.AveragedModel(model).parameters()),
    }
    if parameters[0].dtype != torch.bfloat16 and parameters[0].is_cpu:
        ways["numpy"] = [p.detach().numpy() for p in parameters]
    return ways


def _as_tensor(view):
    return view if isinstance(view, torch.Tensor) else torch.from_numpy(view)


def _copies(ways):
    return {way: [_as_tensor(v).detach().clone() for v in views] for way, views in ways.items()}


def _require_equal(ways, expected, where):
    for way, views in ways.items():
        for view, value in zip(views, expected[way], strict=True):
            assert same_bits(_as_tensor(view).detach(), value), (way, where)


def _saved_bytes(values):
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file, file.getbuffer().nbytes


def _keep_views():
    rank, world = rank_and_world()
    batches = make_batches(6, world)
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            model = make_model()
            engine = make_engine(model, config_of(stage, dtype, live_bytes=1))
            train_step(engine, batches[0, rank])
            with strata.zero.GatheredParameters(list(model.parameters())):
                ways = _views_of(model)
                expected = _copies(ways)
            if stage == 3 and world > 1:
                _require_equal(ways, expected, (stage, dtype, "released"))
                train_step(engine, batches[1, rank])
                train_step(engine, batches[2, rank])
                filler = _overwrite_what_is_free()
                _require_equal(ways, expected, (stage, dtype, "trained on"))
                file, _ = _saved_bytes(ways["state dict"])
                for loaded, value in zip(torch.load(file), expected["state dict"], strict=True):
                    assert same_bits(loaded, value)
                del filler
            else:  # whole: they share memory with the trained parameters, as in plain torch
                train_step(engine, batches[1, rank])
                values = full_parameters(model)
                trained = [v for v in values.values() if v.numel() > 1]
                for view, value in zip(ways["detach"], trained, strict=True):
                    assert same_bits(view, value), (stage, dtype)
            del ways
            with strata.zero.GatheredParameters(list(model.parameters())):
                state = engine.module_state_dict()
                ways = _views_of(model)
                expected = _copies(ways)
                of_state = {name: value.clone() for name, value in state.items()}
                loss = loss_of(engine, batches[3, rank])
            del loss
            engine.destroy()
            filler = _overwrite_what_is_free()
            _require_equal(ways, expected, (stage, dtype, "destroyed"))
            assert differences(state, of_state) == []
            file, _ = _saved_bytes(state)
            assert differences(torch.load(file), of_state) == []
            del filler


@pytest.mark.parametrize("world", [1, 2, 3])
def test_views_of_every_kind_outlive_the_release_and_the_engine(world):
    run_ranks(world, _keep_views)


def _keep_while_a_graph_is_pending(collectives):
    """Rank 0 alone keeps views; ranks must still gather the same units."""
    rank, world = rank_and_world()
    batches = make_batches(5, world)
    model = make_model()
    config = config_of(3, live_bytes=1)
    config["strata"]["collectives"] = collectives
    engine = make_engine(model, config)
    reference = PlainTrainer(make_model(), world, adamw)
    caught = []
    hook = model.layers[1].up.register_forward_hook(
        lambda module, args, output: caught.append(module.weight.detach()) if rank == 0 else None)
    for step, tokens in enumerate(batches[:4]):
        caught.clear()
        loss = loss_of(engine, tokens[rank])
        with strata.zero.GatheredParameters(list(model.parameters())):  # between forward and backward
            state = model.state_dict() if rank == 0 else {}
            values = {name: value.clone() for name, value in state.items()}
        for name, value in values.items():
            assert same_bits(state[name], value), (step, name)
        if rank == 0:
            try:
                assert same_bits(caught[0], values["layers.1.up.weight"])
            except RuntimeError as error:  # autograd may need that memory, and it is not there
                assert "has released" in str(error)
        engine.backward(loss)
        if rank == 0:
            assert same_bits(caught[0], values["layers.1.up.weight"]), "it is there again"
        engine.step()
        reference.micro_step(tokens, loss_of)
        reference.step()
        for name, value in values.items():
            assert same_bits(state[name], value), (step, name)
        assert differences(full_parameters(model), reference.values()) == [], step
    hook.remove()
    caught.clear()
    del state, loss
    engine.empty_partition_cache()
    assert engine.core.memory_report()["device", "gathered weights"][0] == 0
    engine.destroy()


@pytest.mark.parametrize("collectives", ["auto", pytest.param("c10d", marks=needs_a_gpu_each)])
def test_a_pending_graph_and_views_get_along(collectives):
    run_ranks(2, _keep_while_a_graph_is_pending, collectives)


def _move_to_shared_memory():
    rank, world = rank_and_world()
    batches = make_batches(4, world)
    for stage in (0, 3):
        model = make_model()
        engine = make_engine(model, config_of(stage))
        reference = PlainTrainer(make_model(), world, adamw)
        for step, tokens in enumerate(batches):
            if step == 2:
                with strata.zero.GatheredParameters(list(model.parameters())):
                    state = model.state_dict()
                shared = {name: value.share_memory_() for name, value in state.items()}
                before = {name: value.clone() for name, value in shared.items()}
            train_step(engine, tokens[rank])
            reference.micro_step(tokens, loss_of)
            reference.step()
            assert differences(full_parameters(model), reference.values()) == [], (stage, step)
        assert differences(shared, before) == []
        engine.destroy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is shared in another way")
def test_training_goes_on_beside_values_that_were_moved_to_shared_memory():
    run_ranks(2, _move_to_shared_memory)


def _save_parts():
    rank, _ = rank_and_world()
    for stage in (0, 3):
        model = make_model()
        engine = make_engine(model, config_of(stage))
        train_step(engine, make_batches(1, rank_and_world()[1])[0, rank])
        with strata.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            for name, value in model.state_dict().items():
                _, size = _saved_bytes(value)
                _, least = _saved_bytes(value.clone())
                assert size <= 1.3 * least, (stage, name)
            model.state_dict()["head.bias"].fill_(2.0)  # a write reaches the parameter, as in plain torch
            assert model.head.bias.eq(2.0).all()
        engine.destroy()


def test_a_part_that_is_saved_carries_its_own_bytes_alone():
    run_ranks(2, _save_parts)


def _free_after_an_evaluation():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), config_of(3))
    tokens = make_batches(2, world)
    train_step(engine, tokens[0, rank])
    with torch.no_grad():
        loss_of(engine, tokens[1, rank])
    held = lambda: engine.core.memory_report()["device", "gathered weights"][0]  # noqa: E731
    assert held() > 0
    engine.empty_partition_cache()
    assert held() == 0
    train_step(engine, tokens[1, rank])
    engine.destroy()


def test_the_cache_of_gathered_parameters_can_be_emptied():
    run_ranks(2, _free_after_an_evaluation)


def _kept_in_inference_mode():
    """A script keeps views that it made in inference mode, and trains on."""
    rank, world = rank_and_world()
    engine, kept = make_engine(make_model(), config_of(3, live_bytes=1)), []

    def keep(module, args, output):
        if torch.is_inference_mode_enabled():
            kept.append((module.weight.view(-1), module.weight.detach().clone()))

    engine.module.layers[0].norm.register_forward_hook(keep)
    for tokens in make_batches(2, world):
        train_step(engine, tokens[rank])
        with torch.inference_mode():
            loss_of(engine, tokens[rank])
    assert len(kept) == 2 and all(same_bits(view, copied.view(-1)) for view, copied in kept)
    engine.destroy()


def test_views_that_are_kept_in_inference_mode_do_not_end_training():
    run_ranks(2, _kept_in_inference_mode)
