"""The base of this package's optimizers: checks, states in torch's form, saving and loading them. Functions with which
schedules and checkpoints write into the param groups of any optimizer."""

import inspect

import torch

from .. import _C

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def add_group_without_compiler(optimizer, param_group):
    """``torch.optim.Optimizer.add_param_group`` without torch's wrapper, which imports torch's compiler to keep it out:
    880 modules, most of the time of a small model's start."""
    inspect.unwrap(torch.optim.Optimizer.add_param_group)(optimizer, param_group)


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of an element needs that element alone.

    ``state[p]`` is ``{"step": int, **moments}``. A subclass names its moments and has ``update()`` of its own, or one
    moment and ``compute(group, weights, moments, gradients)``, which changes these lists of fp32 tensors in place.

    Args:
        params: parameters or dicts of param groups; float32, bfloat16 or float16, in any mix. Keys of a group that
            tell torch how to compute (``foreach``, ``fused``, ``capturable``, ``differentiable``) have no effect.
        defaults: dict, as of ``torch.optim.Optimizer``.
        fp32_optimizer_states: bool; False keeps moments in the parameter's dtype.
    """

    moments = ()
    set_grad_none = True
    # Keys of param groups that would change the result; a group must not set them.
    refused = ("amsgrad", "maximize")

    def __init__(self, params, defaults, fp32_optimizer_states):
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(params, defaults)

    def add_param_group(self, param_group):
        """As torch's. UsageError for a setting that this optimizer does not have."""
        self._refuse(self.defaults | param_group)
        add_group_without_compiler(self, param_group)

    def zero_grad(self, set_to_none=None):
        """Drops gradients, or zeroes them; None: as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates the parameters that have a gradient; others, and their counts of steps, do not change. Returns the
        result of ``closure``, a callable that computes gradients and returns the loss, or None. UsageError for a
        parameter or gradient that cannot be updated; nothing has been changed then."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, parameters in ready:
            for parameter in parameters:
                self._check(parameter)
        for group, parameters in ready:
            if not parameters:
                continue
            counts = [self._state_of(parameter)["step"] + 1 for parameter in parameters]
            self.update(group, parameters, counts)
            for parameter, count in zip(parameters, counts, strict=True):
                self.state[parameter]["step"] = count
        return loss

    def load_state_dict(self, state_dict):
        """Loads what ``state_dict()`` returned, of this class, or of torch's or DeepSpeed's with the same moments.
        These get the dtype that they have here, at once: they are not rounded to the parameter's first, as torch does
        it.

        Raises:
            UsageError: states without these moments, or with settings that this optimizer does not have.
            ValueError: other param groups, as torch's.
        """
        for group in state_dict["param_groups"]:
            self._refuse(group)
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)  # without the wrapper, as above
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # DeepSpeed's FusedAdam has this key, and counts the steps of all parameters at one of them.
            counts_once = ours.pop("step", None) is not None
            saved = [(p, state_dict["state"].get(i)) for p, i in zip(ours["params"], theirs["params"], strict=True)]
            saved = [(parameter, state) for parameter, state in saved if state]
            most = max((int(state.get("step", 0)) for _, state in saved), default=0)
            for parameter, state in saved:
                missing = [name for name in ("step", *self.moments) if name not in state]
                if missing:
                    raise _C.UsageError(f"{type(self).__name__} cannot go on from these states, which lack "
                                        f"'{missing[0]}'; load those of the same kind of optimizer; found: "
                                        f"{', '.join(map(str, state))}")
                moments = {n: state[n].to(parameter.device, self._dtype_of(parameter)) for n in self.moments}
                self.state[parameter] = {"step": most if counts_once else int(state["step"]), **moments}

    def __getstate__(self):
        return super().__getstate__() | {k: v for k, v in self.__dict__.items() if isinstance(v, (bool, int))}

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:  # groups of another library may lack some settings
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _refuse(self, group):
        for name in self.refused:
            if group.get(name):
                raise _C.UsageError(f"{type(self).__name__} has no {name}; leave it out, or take a class of "
                                    f"torch.optim that has it; found {name}={group[name]}")

    def _check(self, parameter):
        if parameter.dtype not in _DTYPES:
            raise _C.UsageError(f"{type(self).__name__} updates float32, bfloat16 and float16; convert the parameter, "
                                f"or take a class of torch.optim; found {described(parameter)}")
        if parameter.grad.layout != torch.strided and not self.takes_sparse(parameter.grad):
            raise _C.UsageError(f"{type(self).__name__} has no update for sparse gradients; make the embedding with "
                                f"sparse=False, or take torch.optim.SparseAdam; found one of {described(parameter)}")

    def update(self, group, parameters, counts):
        """Called by ``step()``: parameters of ``group`` with gradients, of their updates number ``counts``. Tensors of
        16 bits are rounded at the end."""
        moments = [self.state[p][self.moments[0]] for p in parameters]
        targets = [*parameters, *moments]
        values = [tensor.float() for tensor in targets]
        self.compute(group, values[: len(parameters)], values[len(parameters) :], [p.grad.float() for p in parameters])
        for target, value in zip(targets, values, strict=True):
            if value is not target:
                target.copy_(value)

    def takes_sparse(self, gradient):
        """Whether ``update`` takes this gradient, which is not dense."""
        return False

    def _dtype_of(self, parameter):
        return torch.float32 if self.fp32_optimizer_states else parameter.dtype

    def _state_of(self, parameter):
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in self.moments:
                state[name] = torch.zeros_like(parameter, dtype=self._dtype_of(parameter))
        return state


def described(parameter):
    """A description of a parameter without a name: its dtype, shape and device."""
    return f"a {parameter.dtype} parameter of shape {list(parameter.shape)} on {parameter.device}"


def set_value(group, key, value):
    """Sets a value of a param group. A tensor is filled in place, as torch's schedulers do: compiled steps hold it."""
    if isinstance(group.get(key), torch.Tensor) and group[key] is not value:
        group[key].copy_(value) if isinstance(value, torch.Tensor) else group[key].fill_(value)
    else:
        group[key] = value


def set_values(group, values):
    """``set_value`` of each of ``values``, a dict, but for "params"."""
    for key, value in values.items():
        if key != "params":
            set_value(group, key, value)


def place_of(key, group, parameter):
    """The device on which torch's optimizers keep a state of one element, by the rule of their load_state_dict."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return parameter.device if on_device else "cpu"
