"""Optimizers of the user's: some may update parts of parameters, others need whole ones; and their states."""

import itertools
import pickle

import pytest
import strata
import torch
from plain_torch import PlainTrainer, exact_square_roots
from ranks import run_ranks
from tiny_models import (
    DTYPES, config_of, differences, full_parameters, loss_of, make_batches, make_engine, make_model, rank_and_world,
    train_step,
)


class LayerScaled(torch.optim.SGD):
    """An optimizer like LAMB: a step's length depends on the norms of whole tensors. One of its states has a shape that
    is no parameter's."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                rows = self.state[p].setdefault("rows", torch.zeros(p.shape[:1], device=p.device))
                rows += p.grad.reshape(p.shape[0], -1).mean(1) if p.dim() else p.grad
                average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.add_(average, alpha=-float(group["lr"] * (1 + p.norm() + rows.norm())))


class Clipping(torch.optim.SGD):
    """Looks at all parameters at once."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class InBackward(torch.optim.Optimizer):
    """Updates each parameter as soon as its gradient is there, as LOMO does."""


def _filled(parameters):
    """Leaves out the parameter without elements, for which the engine has no gradient."""
    return [p for p in parameters if p.numel()]


WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(_filled(p), lr=0.01),
    "LayerScaled": lambda p: LayerScaled(p, lr=0.05),
    "Clipping": lambda p: Clipping(_filled(p), lr=0.05),
}


def _trained_whole(stages, dtypes, accumulations, names):
    rank, world = rank_and_world()
    for stage, dtype, accumulation, name in itertools.product(stages, dtypes, accumulations, names):
        reference = PlainTrainer(make_model(), world, WHOLE[name], dtype=DTYPES[dtype], accumulation=accumulation)
        model = make_model()
        engine = make_engine(model, config_of(stage, dtype, accumulation, optimizer=False),
                             optimizer=WHOLE[name](model.parameters()))
        for index, tokens in enumerate(make_batches(3 * accumulation, world), 1):
            reference.micro_step(tokens, loss_of)
            with exact_square_roots():
                train_step(engine, tokens[rank])
            if index % accumulation == 0:
                reference.step()
            case = (stage, dtype, accumulation, name)
            assert differences(full_parameters(model), reference.values()) == [], case
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_optimizer_that_needs_whole_parameters_gets_them(world):
    """Training has the bits of plain torch at every stage; one that looks at all parameters at once, at stage 0, and on
    one rank."""
    dtypes, apart = ("bf16",) if world == 2 else ("fp32",), [name for name in WHOLE if name != "Clipping"]
    run_ranks(world, _trained_whole, (0, 3) if world == 1 else (0,), dtypes, (2,), list(WHOLE))
    run_ranks(world, _trained_whole, (1, 2, 3), dtypes, (2,), apart)


def _refused():
    model = make_model()
    before = torch.random.get_rng_state()
    for stage in (1, 2, 3):
        with pytest.raises(strata.UsageError, match=f"Clipping does not update.*stage 0.*found stage {stage} on 2"):
            strata.initialize(model=model, config=config_of(stage, optimizer=False),
                              optimizer=WHOLE["Clipping"](model.parameters()))
    with pytest.raises(strata.UsageError, match="LBFGS computes the loss itself"):
        strata.initialize(model=model, config=config_of(0, optimizer=False),
                          optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(strata.UsageError, match="InBackward has no step"):
        strata.initialize(model=model, config=config_of(0, optimizer=False),
                          optimizer=InBackward(model.parameters(), {}))
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_optimizer_whose_parts_would_update_otherwise_is_refused_by_name():
    run_ranks(2, _refused)


class Own(torch.optim.Adagrad):
    """Element by element, with states from its constructor, and settings that its constructor does not know."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, initial_accumulator_value=0.1, foreach=True)


class Wrapping(torch.optim.Optimizer):
    """Has another one work on its groups."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


def test_the_probe_takes_what_works_element_by_element():
    from strata.optimizer_probe import why_not_by_element

    parameters = list(make_model().parameters())
    rate = torch.tensor(0.1)
    for cls, settings in (
        (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.Adamax, {}),
        (torch.optim.SGD, {"lr": rate, "momentum": 0.9}), (torch.optim.NAdam, {"foreach": True}),
        (torch.optim.Rprop, {}), (torch.optim.ASGD, {}), (torch.optim.Adadelta, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RAdam, {"maximize": True}), (strata.ops.lion.FusedLion, {}), (Wrapping, {}),
    ):  # fmt: skip
        subclass = type("Subclass", (cls,), {})
        optimizer = subclass([{"params": parameters[::2]}, {"params": parameters[1::2]}], **settings)
        assert why_not_by_element(optimizer, torch.device("cpu")) is None, cls
        assert not optimizer.state and all(p.grad is None for p in parameters)
    assert rate.item() == pytest.approx(0.1)


def _checkpointed(folder):
    """Saved by two ranks, loaded by three or one of them: states of any shape come back."""
    rank, world = rank_and_world()
    results = []
    batches = make_batches(4, world)
    for name in ("LayerScaled", "Adafactor"):
        model = make_model()
        engine = make_engine(model, config_of(0, optimizer=False), optimizer=WHOLE[name](model.parameters()))
        for tokens in batches[:2]:
            train_step(engine, tokens[rank])
        engine.save_checkpoint(f"{folder}/{name}")
        for tokens in batches[2:]:
            train_step(engine, tokens[rank])
        expected = full_parameters(model)
        engine.destroy()
        model = make_model(seed=5)
        engine = make_engine(model, config_of(0, optimizer=False), optimizer=WHOLE[name](model.parameters()))
        engine.load_checkpoint(f"{folder}/{name}")
        for tokens in batches[2:]:
            train_step(engine, tokens[rank])
        results.append(differences(full_parameters(model), expected))
        engine.destroy()
    return results


def test_training_goes_on_with_states_of_any_shape(tmp_path):
    assert run_ranks(2, _checkpointed, str(tmp_path)) == [[[], []]] * 2


def _momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _gradients_of_groups():
    """An error where a script would clip, drop or scale nothing."""
    rank, world = rank_and_world()
    tokens = make_batches(2, world)
    for stage, rule in ((0, _momentum), (0, WHOLE["LayerScaled"]), (3, WHOLE["Adafactor"]), (3, _momentum)):
        model = make_model()
        engine = make_engine(model, config_of(stage, optimizer=False), optimizer=rule(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        parts = [part for group in engine.optimizer.param_groups for part in group["params"]]
        for batch in tokens:
            assert all(part.grad is None for part in parts)
            engine.backward(loss_of(engine, batch[rank]))
            for use in (
                lambda: torch.nn.utils.clip_grad_norm_(parts, 0.1),
                lambda: [setattr(part, "grad", None) for part in parts],
                lambda: scaler.unscale_(engine.optimizer),
            ):  # fmt: skip
                with pytest.raises(strata.UsageError, match="model's own parameters.*gradient_clipping"):
                    use()
            engine.step()
            assert engine.was_step_applied()
        assert all(type(part) is torch.nn.Parameter for part in pickle.loads(pickle.dumps(parts)))
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_not_looked_for_in_the_param_groups_of_parts(world):
    run_ranks(world, _gradients_of_groups)


LION = {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}


def _lion():
    rank, world = rank_and_world()
    rule = strata.ops.lion.DeepSpeedCPULion
    for stage in (1, 3):
        reference = PlainTrainer(make_model(), world, lambda p: rule(p, **LION), dtype=torch.bfloat16)
        engine = make_engine(make_model(), {**config_of(stage, "bf16"), "optimizer": {"type": "Lion", "params": LION}})
        assert isinstance(engine.optimizer, rule)
        for tokens in make_batches(3, world):
            reference.micro_step(tokens, loss_of)
            train_step(engine, tokens[rank])
            reference.step()
        assert differences(full_parameters(engine.module), reference.values()) == [], stage
        engine.destroy()


def test_the_configuration_may_name_lion():
    run_ranks(2, _lion)
