"""The engine moves batches from the host to the model's device, whatever container holds them."""

import collections
import dataclasses

import pytest
import strata
import torch
from devices import ON_GPU, needs_a_gpu_each, test_device
from ranks import run_ranks
from strata.model.interception import moved_arguments
from tiny_models import config_of, make_engine, make_model
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

META = torch.device("meta")  # the device of no memory stands for a GPU here
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    name: str


def moved(value, device=META, floating=None):
    return moved_arguments((value,), {}, device, floating)[0][0]


@pytest.mark.parametrize(
    "make, look",
    [
        (lambda t: t, lambda v: v),
        (lambda t: (1, t), lambda v: v[1]),
        (lambda t: Pair("a", t), lambda v: v.second),
        (lambda t: [[t]], lambda v: v[0][0]),
        (lambda t: {"x": {"y": t}}, lambda v: v["x"]["y"]),
        (lambda t: collections.OrderedDict(x=t), lambda v: v["x"]),
        (lambda t: collections.defaultdict(list, x=t), lambda v: v["x"]),
        (lambda t: BatchEncoding({"input_ids": t}), lambda v: v["input_ids"]),
        (lambda t: Batch(t, "one"), lambda v: v.tokens),
        (lambda t: CausalLMOutput(logits=t), lambda v: v.logits),
    ],
)
def test_containers_keep_their_kind_and_the_callers_values(make, look):
    tensor = torch.ones(3)
    value = make(tensor)
    there = moved(value)
    assert type(there) is type(value)
    assert look(there).device == META
    assert look(value) is tensor  # the caller's is as it was


def test_what_needs_no_move_is_passed_on_as_it_is():
    here = [torch.ones(2), {"x": (torch.zeros(1), "text", None)}, Batch(torch.ones(1), "n"), 3, torch.nn.Linear]
    assert moved(here, torch.device("cpu")) is here


def test_floating_tensors_alone_are_cast():
    there = moved({"x": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, None, torch.float16)
    assert there["x"].dtype == torch.float16 and there["n"].dtype == torch.int64


def test_a_tensor_that_is_elsewhere_is_refused_by_the_names_of_both_places():
    with pytest.raises(strata.UsageError) as error:
        moved_arguments((), {"input_ids": [torch.ones(2, device="meta")]}, torch.device("cpu"))
    assert "the model is on cpu" in str(error.value)
    assert "argument 'input_ids' has a tensor on meta" in str(error.value)


def test_gradients_flow_back_to_a_host_tensor():
    source = torch.ones(2, requires_grad=True)
    moved(source, torch.device("cpu"), torch.float64).sum().backward()
    assert source.grad is not None


class Generating(torch.nn.Module):
    """Records the device of its arguments."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, parts=()):
        self.seen = [x.device, *(part.device for part in parts)]
        return self.layer(x).sum()

    def generate(self, ids, **kwargs):
        """Writes on."""
        return ids.device, kwargs["mask"].device


def _enter_everywhere(move):
    torch.manual_seed(0)
    model = Generating()
    before = model.generate
    engine = make_engine(model, config_of(3, strata={"move_inputs": move}))
    x = torch.ones(2, 4)
    if not move and ON_GPU:
        with pytest.raises(RuntimeError):
            engine(x)
        return None
    seen = []
    for enter in (engine, engine.module):
        enter(x, parts=[x])
        seen += model.seen
    with torch.no_grad():
        engine(x.pin_memory() if ON_GPU else x)
    seen += [*model.seen, *model.generate(torch.ones(1), mask=torch.ones(1)), *engine.generate(x, mask=x)]
    assert model.generate.__doc__ == "Writes on."
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    assert model.generate == before and not model._forward_pre_hooks
    return set(seen) == {test_device()}


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_into_the_model_takes_a_batch_on_the_host(world):
    assert run_ranks(world, _enter_everywhere, True) == [True] * world


def test_the_move_can_be_left_to_the_script():
    assert run_ranks(1, _enter_everywhere, False) == [None if ON_GPU else True]


def _loader_of_an_engine():
    data = torch.utils.data.TensorDataset(torch.ones(8, 1, dtype=torch.int64))
    engine, _, loader, _ = strata.initialize(
        model=make_model().to(test_device()), config=config_of(3), training_data=data
    )
    (tokens,) = next(iter(loader))
    pinned = tokens.is_pinned() if ON_GPU else False
    engine(tokens)
    return tokens.device.type, pinned


def test_the_loader_of_an_engine_on_a_gpu_pins():
    assert run_ranks(1, _loader_of_an_engine) == [("cpu", ON_GPU)]


def _batch_on_the_others_gpu():
    engine = make_engine(make_model(), config_of(3))
    other = torch.device("cuda", 1 - test_device().index)
    with pytest.raises(strata.UsageError, match=f"the model is on {test_device()}.* a tensor on {other}"):
        engine(torch.ones(2, 3, dtype=torch.int64, device=other))


@needs_a_gpu_each
@pytest.mark.skipif(not ON_GPU, reason="a batch on another GPU")
def test_a_batch_on_another_gpu_is_refused():
    run_ranks(2, _batch_on_the_others_gpu)
