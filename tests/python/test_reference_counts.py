"""Whether something else than its container refers to an object, whatever Python itself counts."""

import torch
from strata.model.constructors import is_alone, references


def test_an_item_is_alone_until_something_else_refers_to_it():
    for make in (object, lambda: torch.nn.Linear(2, 2), lambda: torch.nn.Parameter(torch.ones(2))):
        for container, key in (([make(), make()], 1), ({"a": make()}, "a")):
            assert is_alone(container, key)
            usual = references(container, key)
            other = container[key]
            assert not is_alone(container, key) and references(container, key) == usual + 1
            del other
            assert is_alone(container, key)


def test_a_dict_that_reads_in_a_way_of_its_own_is_asked_as_a_dict():
    class Reading(dict):
        def __getitem__(self, key):
            raise AssertionError("read")

    reading = Reading()
    reading["a"] = object()
    assert is_alone(reading, "a")


def test_a_loop_over_other_items_does_not_count():
    items = [object() for _ in range(4)]
    assert [is_alone(items, place) for place in range(len(items))] == [True] * 4
