"""Every optimizer on a tiny Qwen3 and Qwen3-MoE: the same bits of weights and states at every stage and place, however
the model is built, in tiles, after a resumption and a skipped step; and at every number of ranks that see the same
rows."""

import contextlib
import hashlib
import math

import pytest
import strata
import torch
import transformers as hf
from hf_models import MODELS, VOCABULARY
from ranks import run_ranks
from soak import ALL, also
from strata.model.model_input import ModelTree
from strata.muon import find_matrices
from strata.ops import muon
from tiny_models import full_parameters, make_engine, rank_and_world
from training_states import states_by_name

DECAY = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}
EIGHT = {"strata": {"min_8bit_size": 16}}  # blocks that parameters fill in part, too
# Changes of the configuration, or a callable that makes an object of the class.
OPTIMIZERS = {
    "AdamW": {"optimizer": {"type": "AdamW", "params": DECAY}},
    "AdamW8bit": {"optimizer": {"type": "AdamW8bit", "params": DECAY}, **EIGHT},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-2, "weight_decay": 0.1}}},
    "Lion": {"optimizer": {"type": "Lion", "params": LION}},
    "Lion8bit": {"optimizer": {"type": "Lion8bit", "params": LION}, **EIGHT},
    "Adam8bit": {"optimizer": {"type": "Adam8bit", "params": DECAY | {"adam_w_mode": False}}, **EIGHT},
    "Muon beside 8 bits": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-2}},
                           "strata": {"min_8bit_size": 16, "optimizer_states": "8bit"}},
    "torch's Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "transformers' Adafactor": lambda p: hf.optimization.Adafactor(p, lr=1e-2, scale_parameter=False,
                                                                   relative_step=False),
}  # fmt: skip
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
# The stage, and what else the run differs in: first the one that others are compared with.
CASES = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "host": (2, ON_HOST),
    "host, stage 3": (3, ON_HOST),
    "drive": (3, {"offload_optimizer": {"device": "nvme"}}),
    "zero.Init": (3, {}),
    "files": (3, {}),
    "tiles": (3, {}),
    "boundary": (3, {}),
    "resumed": (3, {}),
    "skipped": (2, {}),
    "parked": (3, {}),
}
NOT_WHOLE = ("drive", "tiles")  # refused, where an optimizer needs whole parameters
STEPS = 3


def _is_whole(name):
    return callable(OPTIMIZERS[name])


def _config(name, case, setup, folder):
    dtype, accumulation, rows, clipping = setup
    stage, zero = CASES[case]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    if case == "drive":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder, "buffer_size": 100_000}
    config = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation,
              "gradient_clipping": clipping, "zero_optimization": zero, "strata": {"max_live_bytes": 1}}
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    if case == "tiles":
        config["strata"]["tiles"] = {"max_gather": 8192, "match": ["*.experts.*"]}
    if case == "boundary":
        config["strata"]["reduce_at"] = "boundary"
    for section, more in ({} if _is_whole(name) else OPTIMIZERS[name]).items():
        config[section] = {**config.get(section, {}), **more}
    return config


def _build(model):
    torch.manual_seed(0)
    model = MODELS[model].build()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _engine(name, case, setup, model, folder):
    """An engine with the values of the files, however it is built."""
    config, files = _config(name, case, setup, folder), f"{folder}/{model}"
    more = {"optimizer": OPTIMIZERS[name]} if _is_whole(name) else {}
    if case == "files":
        engine = strata.load_pretrained(files, config, **more)[0]
        engine.module.set_experts_implementation("eager")
    elif case == "zero.Init":
        with strata.zero.Init(config_dict_or_path=config):
            built = _build(model)
        engine = make_engine(built, config, **more)
        strata.load_weights(engine, files)
    else:
        built = _build(model)
        engine = make_engine(built, config, **more)
    engine.train()
    return engine


def _rows(step, micro, rank, setup):
    _, accumulation, rows, _ = setup
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(3, VOCABULARY, (rows, 9), generator=generator)


def _step(engine, step, setup, alike, factor=1.0):
    for micro in range(setup[1]):
        ids = _rows(step, micro, 0 if alike else engine.global_rank, setup)
        engine.backward(engine(input_ids=ids, labels=ids).loss * factor)
        engine.step()


def _bits(engine):
    """{name of a weight, master or state: a digest of its bits}."""
    get = strata.utils.safe_get_full_fp32_param
    masters = {f"master {name}": get(p) for name, p in engine.module.named_parameters()}
    values = {**full_parameters(engine.module), **masters, **states_by_name(engine)}
    return {name: hashlib.sha1(v.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, v in values.items()}


@contextlib.contextmanager
def _counting():
    """A list of the numbers of matrices that this rank orthogonalizes."""
    counts, original = [], muon._replace  # gets no zeros that fill a batch

    def counted(matrices, *args):
        counts.append(math.prod(matrices.shape[:-2]))
        return original(matrices, *args)

    muon._replace = counted
    try:
        yield counts
    finally:
        muon._replace = original


def _matrices(model):
    """The number of matrices that Muon updates."""
    found = find_matrices(ModelTree(_build(model))).values()
    return sum(math.prod(matrices.shape[:-2]) * len(matrices.cuts) for matrices in found)


def _trained(name, case, setup, model, folder, alike=False):
    """(bits, norms) after all steps of one case. Each matrix is orthogonalized once a step, by one rank."""
    with _counting() as counts:
        found, norms, total = _trained_uncounted(name, case, setup, model, folder, alike, counts)
    assert total == (STEPS * _matrices(model) if "Muon" in name else 0), (name, case)
    return found, norms


def _trained_uncounted(name, case, setup, model, folder, alike, counts):
    engine = _engine(name, case, setup, model, folder)
    norms = []
    for step in range(STEPS):
        if step == 2 and case == "resumed":
            engine.save_checkpoint(f"{folder}/{name}")
            engine.destroy()
            engine = _engine(name, "stage 2", setup, model, folder)
            engine.load_checkpoint(f"{folder}/{name}")
            engine.train()
        if step == 2 and case == "skipped":
            before = _bits(engine)
            _step(engine, step, setup, alike, float("inf") if engine.global_rank == 0 else 1.0)
            assert not engine.was_step_applied() and _bits(engine) == before, name
        if step == 2 and case == "parked":
            engine.offload_states()
            engine.reload_states()
        _step(engine, step, setup, alike)
        assert engine.was_step_applied(), (name, case, step)
        norms.append(engine.get_global_grad_norm())
    found, total = _bits(engine), sum(map(int, engine._collectives.all_gather_text(str(sum(counts)))))
    engine.destroy()
    return found, norms, total


def _files(model, folder):
    if rank_and_world()[0] == 0:
        _build(model).save_pretrained(f"{folder}/{model}")
    strata.init_distributed()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _everywhere(cases_of, setup, model, folder):
    """Asserts that each optimizer has the same bits in all of its cases."""
    _files(model, folder)
    for name, cases in cases_of.items():
        found = {case: _trained(name, case, setup, model, folder) for case in cases}
        (bits, norms), first = found[cases[0]], cases[0]
        for case, (other, others_norms) in found.items():
            assert others_norms == pytest.approx(norms, rel=1e-5), (name, case)
            assert other.keys() == bits.keys(), (name, case)
            unlike = [key for key in bits if bits[key] != other[key]]
            assert unlike == [], f"{name}: {case} differs from {first}"


# The cases of `make test`; `make soak` has all.
FEW = {
    "AdamW8bit": ("stage 3", "drive", "resumed"),
    "Muon": ("host, stage 3", "drive", "files", "resumed"),
    "Lion": ("host, stage 3", "zero.Init"),
    "Lion8bit": ("tiles", "skipped"),
    "Muon beside 8 bits": ("tiles", "skipped", "resumed"),
    "torch's Adafactor": ("host", "files"),
    "transformers' Adafactor": ("zero.Init", "parked", "resumed"),
}


def _cases(name, model, setup):
    """The cases of one optimizer, all of them."""
    left_out = {*(NOT_WHOLE if _is_whole(name) else ()), *(() if model == "qwen3_moe" else ("tiles",)),
                *(("boundary",) if setup[1] > 1 else ())}  # sums of micro-steps have another order there
    return [case for case in CASES if case not in left_out]


# (dtype, micro-steps, rows of each, clipping). The gradient's norm is about 1.
SETUPS = [("bf16", 4, 2, 0.1), ("bf16", 1, 8, 1.0), ("fp32", 1, 8, 0.0), ("fp32", 4, 2, 1.0), ("fp16", 4, 2, 0.0)]
ALL_RUNS = [*(("qwen3_moe", setup) for setup in SETUPS), ("qwen3", SETUPS[1]), ("qwen3", SETUPS[3])]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("model, setup", [ALL_RUNS[0], *also(*ALL_RUNS[1:])])
def test_stages_places_ways_and_resumption_have_the_same_bits(world, model, setup, tmp_path):
    every = {name: _cases(name, model, setup) for name in OPTIMIZERS}
    few = {name: ("stage 0", *cases) for name, cases in FEW.items()}
    run_ranks(world, _everywhere, every if ALL else few, setup, model, str(tmp_path), timeout=1200.0)


def _alike(names, case, folder):
    """{optimizer: bits} where all ranks see the same rows. Sums of a few gradients of 8 significant bits are exact, so
    their mean does not depend on the number of ranks."""
    _files("qwen3_moe", folder)
    return {name: _trained(name, case, ("bf16", 2, 2, 0.1), "qwen3_moe", folder, alike=True)[0] for name in names}


def test_the_number_of_ranks_changes_no_bit(tmp_path):
    names = list(OPTIMIZERS) if ALL else ["AdamW8bit", "Muon", "Lion", "torch's Adafactor"]
    expected = run_ranks(1, _alike, names, "stage 0", str(tmp_path))[0]
    for world in (2, 3) if ALL else (3,):
        for found in run_ranks(world, _alike, names, "stage 3", str(tmp_path)):
            assert {name: [k for k in bits if bits[k] != found[name][k]] for name, bits in expected.items()} == {
                name: [] for name in names}, world


def _beside_torch(clipping):
    """One rank beside torch's own classes, with the norm clipped before ``step()``. The norm is a sum in another order,
    and Newton-Schulz makes of a last bit up to a hundredth of an update."""
    setup = ("fp32", 1, 8, clipping)
    plain = _build("qwen3")
    found = find_matrices(ModelTree(plain))
    matrices, others = ([p for p in plain.parameters() if (id(p) in found) == wanted] for wanted in (True, False))
    both = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95),
            torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10, foreach=False)]
    engine = make_engine(_build("qwen3"), _config("Muon", "stage 3", setup, None))
    engine.train()
    for step in range(STEPS):
        _step(engine, step, setup, False)
        ids = _rows(step, 0, 0, setup)
        plain(input_ids=ids, labels=ids).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clipping or math.inf).item()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5 if step == 0 else 1e-2)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        bound = 1e-3 if step or clipping else 1e-6
        for name, value in full_parameters(engine.module).items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=bound, atol=bound,
                                       msg=lambda m, name=name, step=step: f"{name} after step {step}: {m}")


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_one_rank_is_torchs_muon_and_adamw(clipping):
    run_ranks(1, _beside_torch, clipping)


ROWS = 24  # of a step, over all ranks and micro-steps


def _in_parts(names, accumulation, exact):
    """{optimizer: weights} in fp32 after three steps of the same rows, whatever ranks and micro-steps share them."""
    rank, world = rank_and_world()
    kept = muon.newton_schulz
    if exact:
        muon.newton_schulz = _newton_schulz_in_fp32
    found = {}
    for name in names:
        config = _config(name, "stage 3", ("fp32", accumulation, ROWS // world // accumulation, 0.5), None)
        more = {"optimizer": OPTIMIZERS[name]} if _is_whole(name) else {}
        engine = make_engine(_build("qwen3"), config, **more)
        engine.train()
        start = full_parameters(engine.module)
        for step in range(3):
            ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(step))
            for part in ids[rank::world].chunk(accumulation):
                engine.backward(engine(input_ids=part, labels=part).loss)
                engine.step()
        found[name] = start, full_parameters(engine.module)
        engine.destroy()
    muon.newton_schulz = kept
    return found


# The largest relative difference of the change of all weights. Newton-Schulz in bf16 makes of a last bit up to a
# hundredth; a code beside an edge goes to its other side; a sign of Lion's may turn.
BOUNDS = {"AdamW": 1e-3, "AdamW8bit": 1e-2, "Muon": 3e-2, "Lion": 1e-2, "torch's Adafactor": 1e-4}


def _changes(first, second):
    """(largest difference of a weight, relative difference of the change) of two results of ``_in_parts``."""
    (start, one), (_, other) = first, second
    squares = [sum(x.square().sum().item() for x in of) for of in (
        [one[n] - other[n] for n in one], [one[n] - start[n] for n in one])]
    return max((one[n] - other[n]).abs().max().item() for n in one), math.sqrt(squares[0] / squares[1])


@pytest.mark.parametrize("exact", [False, *also(True)])
def test_ranks_and_micro_steps_share_the_rows_of_a_step(exact):
    """``exact``: Newton-Schulz in fp32, whose inputs and results still travel in bf16."""
    names = ["Muon"] if exact else list(BOUNDS)
    expected = run_ranks(1, _in_parts, names, 1, exact)[0]
    for world, accumulation in ((1, 4), (2, 1), (2, 4), (3, 2)) if ALL else ((2, 4),):
        found = run_ranks(world, _in_parts, names, accumulation, exact)[0]
        for name in names:
            largest, relative = _changes(expected[name], found[name])
            assert relative < (4e-3 if exact else BOUNDS[name]), (name, world, accumulation)
            assert largest < (4e-4 if exact else 1e-3), (name, world, accumulation)


def _newton_schulz_in_fp32(matrices, coefficients, steps, eps):
    a, b, c = coefficients
    x = matrices.float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)
