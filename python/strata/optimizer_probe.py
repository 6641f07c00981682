"""Tells whether an optimizer updates each element by itself, so that it can run on parts of parameters.

The probe runs it on small tensors: once on whole ones, and once as two ranks would, each with its own optimizer and
one-dimensional pieces. It updates element by element if both give equal bits after a few steps."""

import collections
import copy
import inspect

import torch

_ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta,
                torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
                torch.optim.ASGD)  # fmt: skip
_SHAPES = {1: ((768,), (128,)), 2: ((8, 96), (4, 32))}
_CUT = 320  # elements of the first piece: whole vectors, so that no element takes a kernel's path for remainders
_STEPS = (1.0, 30.0, 0.01)  # sizes of gradients


def needs_closure(optimizer):
    """Whether its ``step()`` computes the loss itself, several times."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def updates_by_another(optimizer):
    """The attribute's name, such as "inside", of another optimizer in ``optimizer`` that has param groups of its own;
    None: there is none. The other optimizer would keep updating its own parameters when those in the groups of
    ``optimizer`` are replaced. A wrapper that shares the groups of the optimizer inside does not count."""
    own = {id(group) for group in optimizer.param_groups}
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for other in held:
            if not isinstance(other, torch.optim.Optimizer) or other is optimizer:
                continue
            if any(id(group) not in own for group in other.param_groups) or updates_by_another(other):
                return name
    return None


def why_not_by_element(optimizer, device):
    """None where ``optimizer``, which has taken no step, updates element by element on ``device``, a torch.device; else
    the reason, a text. Takes milliseconds; the optimizer and the state of torch's random numbers do not change."""
    if _is_known(optimizer):
        return None
    drawn, everything = _drawn(optimizer)
    of_rank_0 = [[(i, slice(0, _CUT)) for i in range(0, len(tensors), 2)] for tensors in drawn]
    of_rank_1 = [[(i, slice(0 if i % 2 else _CUT, None)) for i in range(len(tensors))] for tensors in drawn]
    where = "a small tensor"
    try:
        whole = _run(optimizer, drawn, everything, device)
        where = "a part of a tensor"
        pieces = [_run(optimizer, drawn, part, device) for part in (of_rank_0, of_rank_1)]
    except Exception as error:
        return f"its step() failed on {where}: {type(error).__name__}: {error}"
    joined = {key: torch.cat([piece[key] for piece in pieces if key in piece]) for key in whole}
    return None if _same_bits(whole, joined) else "on a small tensor and on two parts of it its steps differ"


def why_not_by_parameter(optimizer, device):
    """None where ``optimizer`` updates each parameter by itself: on whole tensors it does the same as two ranks that
    have some of them each, and a third one that has none; else a text with the reason why it does not."""
    drawn, everything = _drawn(optimizer)
    of_ranks = [[[(i, None) for i in range(rank, len(tensors), 2)] for tensors in drawn] for rank in (0, 1)]
    try:
        whole, *parts = [_run(optimizer, drawn, wanted, device) for wanted in (everything, *of_ranks)]
        _run(optimizer, drawn, [[] for _ in drawn], device)
    except Exception as error:
        return f"its step() failed on some of its parameters: {type(error).__name__}: {error}"
    joined = {key: values for part in parts for key, values in part.items()}
    return None if _same_bits(whole, joined) else "its steps differ where a rank has some of the parameters only"


def why_not_in_calls(optimizer):
    """None where ``optimizer``, of which ``why_not_by_element`` is None, does the same if its ``step()`` is called once
    for each parameter, the others having no gradient; else a text with the reason why it does not. Runs on the host."""
    if _is_known(optimizer):
        return None
    drawn, everything = _drawn(optimizer)
    cpu = torch.device("cpu")
    try:
        at_once, in_calls = (_run(optimizer, drawn, everything, cpu, one_by_one=each) for each in (False, True))
    except Exception as error:
        return f"its step() failed where only some parameters have gradients: {type(error).__name__}: {error}"
    return None if _same_bits(at_once, in_calls) else "its steps differ where step() is called once for each tensor"


def _same_bits(one, other):
    return all(torch.equal(one[key].view(torch.int32), other[key].view(torch.int32)) for key in one)


def _is_known(optimizer):
    kind = getattr(type(optimizer), "_strata_likeness", type(optimizer))
    return kind in _ELEMENTWISE or kind.__module__.startswith("strata.ops.")


def _drawn(optimizer):
    """The tensors of each group, and all of them as ``_run`` takes them."""
    shapes = [_shapes_of(group) for group in optimizer.param_groups]
    drawn = [[_values(shape, seed=i) for i, shape in enumerate(of_group)] for of_group in shapes]
    return drawn, [[(i, None) for i in range(len(tensors))] for tensors in drawn]


def _shapes_of(group):
    """Two shapes for each number of dimensions among the group's parameters."""
    known = [getattr(p, "ds_shape", p.shape) for p in group["params"]]
    dimensions = {len(shape) for shape in known if torch.Size(shape).numel()} or {2}
    shapes = []
    for n in sorted({max(1, d) for d in dimensions}):
        first, second = _SHAPES[min(n, 2)]
        shapes += [first[:1] + (1,) * (n - 2) + first[1:], second[:1] + (1,) * (n - 2) + second[1:]]
    return shapes


def _values(shape, seed):
    """(weights, gradients of each step), flat, of mixed sizes, and the shape."""
    generator = torch.Generator().manual_seed(seed + 1)
    numel = torch.Size(shape).numel()
    gradients = [torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator) * size
                 for size in _STEPS]
    return torch.randn(numel, generator=generator), gradients, shape


def _run(optimizer, drawn, wanted, device, one_by_one=False):
    """{(group, tensor): flat weights after the steps}. ``wanted``: by group, [(tensor, slice; None: in its shape)].
    ``one_by_one``: each step calls ``step()`` once for each tensor."""
    parameters, groups = {}, []
    for g, (tensors, members) in enumerate(zip(drawn, wanted, strict=True)):
        for i, part in members:
            weights, _, shape = tensors[i]
            values = weights.view(shape) if part is None else weights[part]
            parameters[g, i] = torch.nn.Parameter(values.to(device, copy=True))
        settings = {k: copy.deepcopy(v) for k, v in optimizer.param_groups[g].items() if k not in _OF_PARAMETERS}
        groups.append({**settings, "params": [parameters[g, i] for i, _ in members]})
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.enable_grad():
        torch.manual_seed(0)
        like = _likeness(optimizer, groups)
        if callable(getattr(like, "train", None)):
            like.train()  # schedule-free optimizers keep two sets of weights
        for step in range(len(_STEPS)):
            for g, members in enumerate(wanted):
                for i, part in members:
                    gradient = drawn[g][i][1][step]
                    gradient = gradient.view(drawn[g][i][2]) if part is None else gradient[part]
                    parameters[g, i].grad = gradient.to(device, copy=True)
                    if one_by_one:
                        like.step()
                        parameters[g, i].grad = None
            if not one_by_one:
                like.step()
    return {key: parameter.detach().reshape(-1).cpu() for key, parameter in parameters.items()}


_OF_PARAMETERS = ("params", "param_names")


def _likeness(optimizer, groups):
    """Another optimizer of the same class and settings, over ``groups``."""
    if optimizer.state:  # its constructor has made states, as Adagrad's does
        return type(optimizer)(groups, **optimizer.defaults)
    like = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):  # the optimizer wraps another one
            value = _likeness(value, groups)
        like.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    like.__dict__.pop("step", None)  # a scheduler has wrapped it
    like.param_groups, like.state = groups, collections.defaultdict(dict)
    return like
