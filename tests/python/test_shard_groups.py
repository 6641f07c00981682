"""Shard groups: sharded inside a group of ranks, the same in every group (zero_optimization.mics_shard_size), or the
weights alone in every group and the rest over all ranks (zero_hpz_partition_size).

The numbers are those of plain torch that adds up inside the groups first, as equal bits on every rank.
"""

import pytest
import torch
from comparison import adamw, compare
from devices import ON_GPU, needs_a_gpu_each, shares_a_gpu
from hf_models import MODELS
from plain_torch import PlainTrainer
from ranks import run_ranks
from soak import also, each_once
from test_adoption import DIFFERENCES, Odd
from test_errors import assert_told, error_of, step_to_its_end, train_until_one_dies
from test_load_save import _assert_same_model, _plain
from tiny_models import (
    DTYPES,
    config_of,
    differences,
    full_parameters,
    make_batches,
    make_engine,
    make_model,
    rank_and_world,
    train_step,
)

import strata

GROUPS = [(2, 1), (4, 2), (4, 1), (4, 4)]  # ranks, and those of a group
MICS, HPZ = "mics_shard_size", "zero_hpz_partition_size"


def _config(group, dtype="fp32", collectives="auto", zero=None, key=MICS, **more):
    more.setdefault("strata", {})["collectives"] = collectives
    return config_of(3, dtype, zero_optimization={key: group, **(zero or {})}, **more)


# --- numbers ---


def _matrix(group, dtype, collectives, key=MICS):
    _, world = rank_and_world()
    for accumulation, clipping in ((1, 0.05), (3, 0.0), (3, 0.05)):
        reference = PlainTrainer(
            make_model(), world, adamw, DTYPES[dtype], clipping, accumulation,
            loss_scale=2.0**8 if dtype == "fp16" else 1.0, group_size=group, groups_at_once=key == HPZ,
        )
        compare(_config(group, dtype, collectives, key=key, accumulation=accumulation, clipping=clipping), reference)


@each_once({"world, group": GROUPS, "dtype": ["fp32", "bf16", "fp16"]})
def test_groups_have_the_bits_of_plain_torch(world, group, dtype):
    run_ranks(world, _matrix, group, dtype, "auto")


@needs_a_gpu_each
@pytest.mark.parametrize("world, group", [(2, 1), (4, 2)])
def test_groups_over_the_process_group(world, group):
    """Two terms have the same sum in any order, so the order of the backend gives the same bits, too."""
    run_ranks(world, _matrix, group, "bf16", "c10d")


@pytest.mark.parametrize("world, group", [(2, 1), (4, 2), *also((6, 3))])
def test_groups_of_peers(world, group):
    run_ranks(world, _matrix, group, "bf16", "peer")


@pytest.mark.parametrize("collectives", ["auto", "c10d", *also("peer")])
def test_groups_of_secondary_shards(collectives):
    if collectives == "c10d" and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    run_ranks(4, _matrix, 2, "bf16", collectives, HPZ)


def _narrow_accumulation(group):
    _, world = rank_and_world()
    reference = PlainTrainer(
        make_model(), world, adamw, torch.bfloat16, accumulation=3, reduce_dtype=torch.bfloat16,
        grad_accum_dtype=torch.bfloat16, group_size=group,
    )
    compare(_config(group, "bf16", accumulation=3, communication_data_type="bf16",
                    data_types={"grad_accum_dtype": "bf16"}), reference)


def test_groups_that_accumulate_in_16_bits():
    run_ranks(4, _narrow_accumulation, 2)


def _with_torchs_optimizer(group):
    _, world = rank_and_world()

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False)

    reference, model = PlainTrainer(make_model(), world, sgd, group_size=group), make_model()
    compare(_config(group, optimizer=False), reference, lambda: model, {"optimizer": sgd(model.parameters())})


def test_groups_under_an_optimizer_of_torch():
    run_ranks(4, _with_torchs_optimizer, 2)


def _persistent(group):
    _, world = rank_and_world()
    reference = PlainTrainer(make_model(), world, adamw, torch.bfloat16, accumulation=1, group_size=group)
    compare(_config(group, "bf16", zero={"stage3_param_persistence_threshold": 40}), reference)


def test_parameters_that_stay_gathered():
    run_ranks(4, _persistent, 2)


# --- where things lie ---


def _held(group, key=MICS):
    engine = make_engine(make_model(), _config(group, "bf16", key=key))
    train_step(engine, make_batches(1, 1)[0, 0])
    report, place = engine.memory_report(), engine._collectives.shard_position
    engine.destroy()
    return {kind: report[("device", kind)][0] for kind in ("weights", "master weights", "optimizer states")
            if ("device", kind) in report}, place


def test_a_rank_holds_a_slice_of_its_group():
    of_two = run_ranks(2, _held, -1)
    for rank, (held, place) in enumerate(run_ranks(4, _held, 2)):
        assert place == (rank % 2, 2, rank // 2, 2, 1)
        assert held and held == of_two[rank % 2][0]


def test_a_rank_holds_weights_of_its_group_and_states_of_the_world():
    of_two, of_four = run_ranks(2, _held, -1), run_ranks(4, _held, -1)
    for held, place in run_ranks(4, _held, 2, HPZ):
        assert place[1:] == (4, 0, 1, 2)
        for kind, size in of_four[0][0].items():
            assert held[kind] == size or kind == "weights"
        assert of_four[0][0]["weights"] <= held["weights"] <= 1.5 * of_two[0][0]["weights"]


# --- values in and out ---


def _adopted(kind, tier, collectives, key=MICS):
    rank, _ = rank_and_world()
    model = Odd()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    if rank > 0:
        with torch.no_grad():
            DIFFERENCES[kind](model)
    config = _config(2, collectives=collectives, key=key, live_bytes=1, strata={"init": {"tier": tier}})
    engine = make_engine(model, config)
    assert tier in ("auto", engine.init_report["tier"])
    assert differences(full_parameters(model), expected) == []
    with strata.zero.GatheredParameters(list(model.parameters()), modifier_rank=3), torch.no_grad():
        if rank == 3:
            model.large[17].fill_(0.5)
    expected["large"][17] = 0.5
    assert differences(full_parameters(model), expected) == []
    engine.destroy(keep_values=True)
    assert differences({name: p.detach() for name, p in model.named_parameters()}, expected) == []


@pytest.mark.skipif(ON_GPU, reason="the ways are those of a model on the host")
@each_once({"tier": ["auto", "device_copy", "device_grow", "distributed", "host"],
            "kind": ["nothing", "one element of a large parameter", "everything"]})
def test_rank_0s_values_arrive_in_every_group(kind, tier):
    run_ranks(4, _adopted, kind, tier, "auto")


@pytest.mark.skipif(ON_GPU, reason="the ways are those of a model on the host")
@each_once({"collectives": ["auto", "c10d"], "tier": ["auto", "distributed"]})
def test_rank_0s_values_arrive_in_secondary_shards(tier, collectives):
    run_ranks(4, _adopted, "everything", tier, collectives, HPZ)


@pytest.mark.skipif(ON_GPU, reason="the ways are those of a model on the host")
def test_rank_0s_values_arrive_over_the_process_group():
    run_ranks(4, _adopted, "everything", "auto", "c10d")


def _loaded_and_saved(root, names, folder, collectives, key):
    for name in names:
        engine, *_ = strata.load_pretrained(root / name, _config(2, collectives=collectives, key=key))
        plain = _plain(root / name, "float32")
        with strata.zero.GatheredParameters(list(engine.module.parameters())):
            _assert_same_model(engine.module, plain, name)
        engine.save_pretrained(folder / name)
        if engine.global_rank == 0:
            _assert_same_model(_plain(folder / name, "float32"), plain, (name, "saved"))
        engine.destroy()
    return True


@each_once({"key": [MICS, HPZ], "collectives": ["auto", "c10d"]})
def test_checkpoints_are_read_and_written_by_groups(tmp_path, collectives, key):
    if collectives == "c10d" and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    names = list(MODELS)[:3]
    for number, name in enumerate(names):
        torch.manual_seed(number)
        MODELS[name].build().save_pretrained(tmp_path / "given" / name)
    assert all(run_ranks(4, _loaded_and_saved, tmp_path / "given", names, tmp_path / "saved", collectives, key))


def _built_inside_init():
    rank, world = rank_and_world()
    config = _config(2)
    with strata.zero.Init(config_dict_or_path=config):
        model = make_model(seed=0)
    reference = PlainTrainer(make_model(seed=0), world, adamw, group_size=2)
    compare(config, reference, lambda: model)


def test_modules_built_inside_init():
    run_ranks(4, _built_inside_init)


# --- bad input ---


def _wrong():
    rank, _ = rank_and_world()
    return {
        "does not divide": error_of(make_engine, make_model(), _config(3)),
        "too large": error_of(make_engine, make_model(), _config(8)),
        "below stage 3": error_of(make_engine, make_model(),
                                  config_of(2, zero_optimization={"stage": 2, "mics_shard_size": 2})),
        "different": error_of(make_engine, make_model(), _config(2 if rank == 3 else 1)),
        "off on one": error_of(make_engine, make_model(), _config(-1 if rank == 1 else 2)),
        "another kind": error_of(make_engine, make_model(), _config(2, key=HPZ if rank == 2 else MICS)),
        "both": error_of(make_engine, make_model(), _config(2, zero={HPZ: 2})),
        "secondary does not divide": error_of(make_engine, make_model(), _config(3, key=HPZ)),
    }


WRONG = {
    "does not divide": ["ConfigError", "mics_shard_size", "must divide the number of ranks", "found 3 for 4 ranks"],
    "too large": ["ConfigError", "mics_shard_size", "found 8 for 4 ranks"],
    "below stage 3": ["ConfigError", "mics_shard_size", "DeepSpeed does not look", "found 2 at stage 2"],
    "different": ["ConfigError", "mics_shard_size", "groups of 1 on rank 0 and groups of 2 on rank 3"],
    "off on one": ["ConfigError", "mics_shard_size", "groups of 2 on rank 0 and groups of 4 on rank 1"],
    "another kind": ["ConfigError", "groups of 2 on rank 0 and secondary groups of 2 on rank 2"],
    "both": ["ConfigError", "mics_shard_size: contradicts zero_optimization.zero_hpz_partition_size"],
    "secondary does not divide": ["ConfigError", "zero_hpz_partition_size", "found 3 for 4 ranks"],
}


def test_groups_that_cannot_be():
    told = run_ranks(4, _wrong)
    for name, words in WRONG.items():
        assert_told([by_rank[name] for by_rank in told], *words)


def _dies(collectives):
    return train_until_one_dies(_config(2, collectives=collectives, live_bytes=1), 3)


@pytest.mark.parametrize("collectives", ["auto", *also("c10d", "peer")])
def test_a_rank_that_dies_is_named_in_every_group(collectives):
    if collectives == "c10d" and shares_a_gpu():
        pytest.skip("NCCL wants a GPU for each rank")
    answers = run_ranks(4, _dies, collectives, timeout=60.0, may_die=[3])
    assert answers[3] is None
    for rank in range(3):
        assert "rank 3" in answers[rank][0] and answers[rank][1] < 20.0, answers[rank]


def _nan():
    rank, world = rank_and_world()
    engine = make_engine(make_model(), _config(2, "fp32", strata={"max_skipped_steps": 0}))
    before = full_parameters(engine.module)
    loss = engine(make_batches(1, world)[0, rank]).float().square().mean()
    engine.backward(loss * float("nan") if rank == 3 else loss)
    message = error_of(step_to_its_end, engine)
    assert differences(full_parameters(engine.module), before) == []
    return message


def test_gradients_that_are_not_finite_are_an_error_in_every_group():
    assert_told(run_ranks(4, _nan), "NumericsError", "not finite")
