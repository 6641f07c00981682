"""``strata.ops.adam``: an optimizer of its own, in any dtype and layout, and the engine's where it is given to one."""

import copy
import pickle

import pytest
import strata
import torch
from comparison import compare
from devices import ON_GPU, test_device
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from strata.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tiny_models import config_of, make_batches, make_model, rank_and_world, same_bits, train_step

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
MODES = {True: torch.optim.AdamW, False: torch.optim.Adam}


def _layouts():
    """Parameters of many sizes; transposed, of every second element, and in torch's order for images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 5, 4, generator=generator).to(memory_format=torch.channels_last)
    values = [torch.randn(shape, generator=generator) for shape in ((), (0,), (1,), (17,), (40, 33), (70_001,))]
    values += [torch.randn(9, 8, generator=generator).t(), torch.randn(20, 6, generator=generator)[:, ::2], images]
    return [torch.nn.Parameter(value) for value in values]


def _clones(parameters):
    return [torch.nn.Parameter(p.detach().clone()) for p in parameters]


def _give_gradients(step, *lists):
    """The same to each list; contiguous ones and such as a transposed product gives."""
    generator = torch.Generator().manual_seed(step)
    for index, same in enumerate(zip(*lists, strict=True)):
        gradient = torch.randn(same[0].shape, generator=generator)
        if index % 2 and gradient.dim() == 2:
            gradient = gradient.t().contiguous().t()
        for parameter in same:
            parameter.grad = gradient.to(parameter.dtype)


def _step_torch(optimizer):
    with exact_square_roots():
        optimizer.step()


def _assert_same(ours, theirs):
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(one.detach(), other.detach()), f"parameter {index}"


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
def test_steps_are_those_of_torch(kind, decoupled):
    """The bits are torch's, given one square root for both."""
    ours, theirs = _layouts(), _layouts()
    optimizer = kind(ours, **SETTINGS, **{"adamw_mode" if kind is DeepSpeedCPUAdam else "adam_w_mode": decoupled})
    reference = MODES[decoupled](theirs, foreach=False, **SETTINGS)
    for step in range(5):
        _give_gradients(step, ours, theirs)
        optimizer.step()
        _step_torch(reference)
        _assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert optimizer.state[one]["step"] == reference.state[other]["step"] == 5
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(optimizer.state[one][name], reference.state[other][name])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_all_shapes_together_are_each_alone(shapes, dtype):
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype).permute(tuple(reversed(range(len(shape))))) for shape in shapes]
    together = [torch.nn.Parameter(value) for value in values]
    alone = _clones(together)
    _give_gradients(0, together, alone)
    DeepSpeedCPUAdam(together, **SETTINGS).step()
    for parameter in alone:
        DeepSpeedCPUAdam([parameter], **SETTINGS).step()
    _assert_same(together, alone)


@pytest.mark.parametrize("fp32_states", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_computed_in_fp32_and_rounded_once_a_step(dtype, fp32_states):
    ours = [torch.nn.Parameter(p.detach().to(dtype)) for p in _layouts()]
    optimizer = DeepSpeedCPUAdam(ours, **SETTINGS, fp32_optimizer_states=fp32_states)
    masters = [torch.nn.Parameter(p.detach().float()) for p in ours]
    reference = torch.optim.AdamW(masters, foreach=False, **SETTINGS)
    for step in range(4):
        _give_gradients(step, ours, masters)
        for parameter, master in zip(ours, masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        _step_torch(reference)
        with torch.no_grad():
            for master in masters:
                rounded = [master] if fp32_states else [master, *_moments(reference, master)]
                for value in rounded:
                    value.copy_(value.to(dtype))
        _assert_same(ours, [master.to(dtype) for master in masters])
    assert optimizer.state[ours[3]]["exp_avg"].dtype == (torch.float32 if fp32_states else dtype)


def _moments(optimizer, parameter):
    return [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]


def _deepspeeds_step(weight, gradient, m, v, step, lr, betas, eps, decay, decoupled, correct):
    """The update that DeepSpeed's CPUAdam documents, in fp64."""
    if not decoupled:
        gradient = gradient + decay * weight
    m.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    v.mul_(betas[1]).add_(gradient**2, alpha=1 - betas[1])
    first, second = (1 - betas[0] ** step, 1 - betas[1] ** step) if correct else (1.0, 1.0)
    if decoupled:
        weight.mul_(1 - lr * decay)
    weight.sub_(lr / first * m / ((v / second).sqrt() + eps))


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_settings_mean_what_deepspeed_means(decoupled, correct):
    (ours,) = parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 1000))]
    optimizer = DeepSpeedCPUAdam(parameters, eps=1e-6, adamw_mode=decoupled, bias_correction=correct, **SETTINGS)
    weight = ours.detach().double()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 5):
        _give_gradients(step, parameters)
        _deepspeeds_step(weight, ours.grad.double(), m, v, step, 1e-2, (0.9, 0.95), 1e-6, 0.1, decoupled, correct)
        optimizer.step()
        torch.testing.assert_close(ours.double(), weight, rtol=1e-5, atol=1e-6)  # fp32's rounding of four steps


def test_what_has_no_gradient_stays_and_a_closures_loss_comes_back():
    one, other = parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = DeepSpeedCPUAdam(parameters, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (one * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(6.0)
    assert torch.equal(other, torch.ones(3)) and not optimizer.state[other] and one[0] < 1
    _give_gradients(0, [other])
    assert optimizer.step() is None
    assert [optimizer.state[p]["step"] for p in parameters] == [2, 1]


def test_autograd_sees_that_weights_have_changed():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = DeepSpeedCPUAdam([weight])
    late = (weight * weight).sum()
    (weight * 1.0).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


def test_param_groups_of_torch_are_taken_as_they_are():
    """accelerate passes lr and weight decay as arguments, and the rest within the groups."""
    ours, theirs = _layouts(), _layouts()
    source = torch.optim.AdamW([{"params": ours[:4], "betas": (0.8, 0.9)}, {"params": ours[4:], "weight_decay": 0.0}],
                               lr=1e-2, foreach=False, capturable=False)  # fmt: skip
    optimizer = DeepSpeedCPUAdam(source.param_groups, lr=1e-2, weight_decay=0.01)
    reference = torch.optim.AdamW([{"params": theirs[:4], "betas": (0.8, 0.9)},
                                   {"params": theirs[4:], "weight_decay": 0.0}], lr=1e-2, foreach=False)  # fmt: skip
    for step in range(3):
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        _give_gradients(step, ours, theirs)
        optimizer.step()
        _step_torch(reference)
    _assert_same(ours, theirs)


@pytest.mark.parametrize("source", ["ours", "torch", "deepspeed", "deepspeed fused"])
def test_training_goes_on_from_saved_states(source):
    theirs = _layouts()
    reference = (DeepSpeedCPUAdam if source == "ours" else torch.optim.AdamW)(theirs, **SETTINGS)
    for step in range(3):
        _give_gradients(step, theirs)
        _step_torch(reference)
    ours = _clones(theirs)
    optimizer = (FusedAdam if "fused" in source else DeepSpeedCPUAdam)(ours, lr=1.0)
    optimizer.load_state_dict(_as_saved(reference.state_dict(), source))
    for step in range(3, 5):
        _give_gradients(step, ours, theirs)
        optimizer.step()
        _step_torch(reference)
    _assert_same(ours, theirs)
    back = torch.optim.AdamW(_clones(ours), lr=1.0)
    back.load_state_dict(optimizer.state_dict())
    assert back.param_groups[0]["lr"] == SETTINGS["lr"]
    assert all(back.state[p]["step"] == 5 for p in back.param_groups[0]["params"])


def _as_saved(state_dict, source):
    """A state dict of torch's AdamW in the form that ``source`` gives it."""
    saved = copy.deepcopy(state_dict)
    if source.startswith("deepspeed"):
        for state in saved["state"].values():
            state["step"] = int(state["step"])
        keys = ("lr", "betas", "eps", "weight_decay", "params")
        groups = [{k: group[k] for k in keys} for group in saved["param_groups"]]
        saved["param_groups"] = [group | {"bias_correction": True} for group in groups]
    if source == "deepspeed fused":
        saved["param_groups"][0]["step"] = 0
        for index, state in saved["state"].items():  # it counts at one parameter
            state["step"] *= index == len(saved["state"]) - 1
    return saved


def test_fp32_states_of_16_bit_weights_are_saved_and_loaded_whole():
    ours = [torch.nn.Parameter(torch.linspace(-1, 1, 100).bfloat16())]
    optimizer = DeepSpeedCPUAdam(ours, bias_correction=False, adamw_mode=False, **SETTINGS)
    _give_gradients(0, ours)
    optimizer.step()
    loaded = DeepSpeedCPUAdam(_clones(ours))
    loaded.load_state_dict(optimizer.state_dict())
    for other in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (parameter,) = other.param_groups[0]["params"]
        for found, expected in zip(_moments(other, parameter), _moments(optimizer, ours[0]), strict=True):
            assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert other.param_groups[0]["bias_correction"] is False
    assert not copy.deepcopy(optimizer).adam_w_mode


def test_what_it_cannot_do_is_refused():
    weight = torch.nn.Parameter(torch.ones(4, 2))
    for kind in (DeepSpeedCPUAdam, FusedAdam):
        with pytest.raises(strata.UsageError, match=f"{kind.__name__} has no amsgrad.*torch.optim"):
            kind([weight], amsgrad=True)
        with pytest.raises(strata.UsageError, match="has no maximize"):
            kind([{"params": [weight], "maximize": True}])
    optimizer = DeepSpeedCPUAdam([weight])
    with pytest.raises(strata.UsageError, match="has no amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW([weight], amsgrad=True).state_dict())
    momentum = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(4, 2)
    momentum.step()
    with pytest.raises(strata.UsageError, match="which lack 'step'.*found: momentum_buffer"):
        optimizer.load_state_dict(momentum.state_dict())
    weight.grad = torch.ones(4, 2).to_sparse()
    wide = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    before = weight.detach().clone()
    for parameters, message in (([weight], "no update for sparse gradients"), ([weight, wide], "sparse"),
                                ([wide], r"updates float32.*found a torch.float64 parameter of shape \[3\] on cpu")):
        with pytest.raises(strata.UsageError, match=message):
            DeepSpeedCPUAdam(parameters).step()
    assert torch.equal(weight, before)
    weight.grad = torch.ones(4, 2)
    optimizer.state[weight] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    with pytest.raises(strata.UsageError, match="load states that belong to this parameter"):
        optimizer.step()


@pytest.mark.skipif(not ON_GPU, reason="of parameters on a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_on_a_gpu(dtype):
    host = [torch.nn.Parameter(p.detach().to(dtype)) for p in _layouts() if p.numel() and p.is_contiguous()]
    for decoupled in (True, False):
        for correct in (True, False):
            options = SETTINGS | {"adam_w_mode": decoupled, "bias_correction": correct}
            ours = [torch.nn.Parameter(p.detach().to(test_device())) for p in host]
            expected = _clones(host)
            optimizers = FusedAdam(ours, **options), FusedAdam(expected, **options)
            for step in range(4):
                _give_gradients(step, expected)
                for parameter, other in zip(ours, expected, strict=True):
                    parameter.grad = other.grad.to(parameter.device)
                for optimizer in optimizers:
                    optimizer.step()
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            for one, other in zip(ours, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, **tolerance)
    with pytest.raises(strata.UsageError, match="updates parameters in host memory; take FusedAdam"):
        DeepSpeedCPUAdam(ours).step()


@pytest.mark.parametrize("options", [{}, {"bias_correction": False}, {"adam_w_mode": False}])
def test_what_gpus_compute_is_what_the_host_does(options, monkeypatch):
    """Torch has the functions for the host, too, where they take counts of any dtype."""
    name = "_fused_adamw_" if options.get("adam_w_mode", True) else "_fused_adam_"
    fused, counted = getattr(torch, name), []
    monkeypatch.setattr(torch, name, lambda *lists, **rest: (counted.extend(lists[5]), fused(*lists, **rest)))
    ours, expected = ([torch.nn.Parameter(p.detach().clone()) for p in _layouts() if p.is_contiguous()] for _ in "12")
    optimizers = [FusedAdam(parameters, **SETTINGS, **options) for parameters in (ours, expected)]
    optimizers[0].update = lambda group, parameters, counts: optimizers[0]._update_on_gpu(
        group, parameters, counts[0], torch.device("cpu"))  # fmt: skip
    for step in range(4):
        _give_gradients(step, ours, expected)
        for optimizer in optimizers:
            optimizer.step()
    assert {count.dtype for count in counted} == {torch.float32}
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class _OfItsOwn(FusedAdam if ON_GPU else DeepSpeedCPUAdam):
    def update(self, group, parameters, counts):
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=group["lr"])


def _in_an_engine():
    rank, world = rank_and_world()
    plain = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    cases = [
        (DeepSpeedCPUAdam, {"adamw_mode": True}, "adamw"), (DeepSpeedCPUAdam, {"adamw_mode": False}, "adam"),
        (FusedAdam, {"adam_w_mode": False}, "adam"), (DeepSpeedCPUAdam, {"bias_correction": False}, None),
    ]  # fmt: skip
    for index, (kind, options, same_as) in enumerate(cases):
        for stage in (1, 2, 3) if index == 0 else (1 + index % 3,):
            model = make_model()
            make = (lambda p, k=plain[same_as]: k(p, foreach=False, **SETTINGS)) if same_as else (
                lambda p, o=options: DeepSpeedCPUAdam(p, **SETTINGS, **o))  # fmt: skip
            optimizer = kind(model.parameters(), **SETTINGS, **options)
            compare(config_of(stage, optimizer=False), PlainTrainer(make_model(), world, make),
                    lambda m=model: m, {"optimizer": optimizer})  # fmt: skip
    for kind, is_ours in ((DeepSpeedCPUAdam, True), (_OfItsOwn, False)):
        model = make_model()
        engine, returned, *_ = strata.initialize(model=model, config=config_of(3, optimizer=False),
                                                 optimizer=kind(model.parameters(), lr=0.1))  # fmt: skip
        assert isinstance(returned, kind) and (returned.inner is None) == is_ours
        train_step(engine, make_batches(1, world)[0][rank])
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_takes_its_settings_over(world):
    run_ranks(world, _in_an_engine)
