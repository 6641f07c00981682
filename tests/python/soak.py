"""Parametrizations with cases that run in `make soak` alone; whole tests are marked by ``pytest.mark.soak``."""

import itertools
import os

import pytest

ALL = "STRATA_SOAK" in os.environ  # where cases share one job of ranks: whether it has them all, as in `make soak`


def each_once(values_of, **more):
    """A parametrization by all combinations, few of which run in `make test`: each value is in at least one of these.

    Args:
        values_of: {names of parameters, as pytest.mark.parametrize takes them: their values}.
        more: for pytest.mark.parametrize.
    """
    lists = [list(values) for values in values_of.values()]
    kept = {tuple(number % len(values) for values in lists) for number in range(max(map(len, lists)))}
    cases = []
    for places in itertools.product(*(range(len(values)) for values in lists)):
        flat = []
        for names, values, place in zip(values_of, lists, places):
            flat += values[place] if "," in names else [values[place]]
        cases.append(pytest.param(*flat, marks=() if places in kept else pytest.mark.soak))
    return pytest.mark.parametrize(", ".join(values_of), cases, **more)


def also(*values):
    """Values of one parameter that are tried in `make soak` alone."""
    return [pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.soak) for value in values]
