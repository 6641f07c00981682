"""The state that training continues from, in the form in which tests compare it bit by bit."""

import os
from contextlib import contextmanager

import pytest
import strata
from tiny_models import full_parameters


def snapshot(engine):
    """Bits of everything that training goes on from, whole, on this rank."""
    bits = {name: value.cpu() for name, value in full_parameters(engine.module).items()}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = strata.utils.safe_get_full_optimizer_state(parameter, key)
            if state is not None:
                bits[f"{key} {name}"] = state.cpu()
        master = strata.utils.safe_get_full_fp32_param(parameter)
        if master is not None:
            bits[f"master {name}"] = master.cpu()
    return bits


def states_by_name(engine):
    """{"state parameter": whole value} of all optimizer states that the engine keeps."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        for state in strata._C.state_names(engine.core):
            try:
                found[f"{state} {name}"] = strata.utils.safe_get_full_optimizer_state(parameter, state)
            except strata.UsageError as error:  # of a parameter with another update rule
                if "found are" not in str(error):
                    raise
    return {name: value for name, value in found.items() if value is not None}


def told_by(function, *args, **kwargs):
    with pytest.raises(strata.Error) as error:
        function(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


@contextmanager
def errors_into(path):
    """Redirects this process's stderr to a file."""
    kept = os.dup(2)
    with open(path, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
