"""Products of tiles: written where they belong, and of groups of rows, by every way that a device may have for them."""

import itertools

import pytest
import torch
from devices import test_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strata.model.tiles import Destination, ProductSum, Tiles, is_widened_by_blas, write_product
from strata.tiles import functions

# Relative tolerances: a sum in another order, and a rounding or two.
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def _near(found, wanted, dtype):
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert (found.double() - wanted.double()).abs().max() <= NEAR[dtype] * wanted.double().abs().max()


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(test_device(), dtype)


@pytest.mark.parametrize("of, to", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2,
                                    (torch.bfloat16, torch.float32), (torch.float16, torch.float32)])  # fmt: skip
def test_a_product_is_written_or_added_whatever_lay_there(of, to):
    one, other, before = _random(24, 40, dtype=of), _random(40, 16, dtype=of, seed=1), _random(24, 16, dtype=to, seed=2)
    product = one.double() @ other.double()
    for holds, factor in itertools.product((False, True), (1.0, 0.75)):
        target = before.clone() if holds else torch.full_like(before, torch.nan)
        write_product(target, one, other, holds, factor)
        wanted = factor * product + (before.double() if holds else 0.0)
        _near(target, wanted.to(to), of)


def test_products_of_16_bits_are_not_rounded_where_the_blas_adds_them_to_a_wide_sum():
    one, other = _random(32, 64, dtype=torch.bfloat16), _random(64, 32, dtype=torch.bfloat16, seed=1)
    total = torch.zeros(32, 32, device=test_device())
    if not is_widened_by_blas(one, total):
        pytest.skip("this device's BLAS does not")
    for _ in range(8):
        write_product(total, one, other, holds=True)
    _near(total, (8 * (one.double() @ other.double())).float(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_sum_of_products_is_rounded_once(dtype, count):
    parts = [(_random(8, 16, dtype=dtype, seed=2 * i), _random(16, 24, dtype=dtype, seed=2 * i + 1))
             for i in range(count)]  # fmt: skip
    destination = Destination(torch.full((8, 24), torch.nan, dtype=dtype, device=test_device()))
    total = ProductSum(destination, count)
    for one, other in parts:
        total.add(one, other)
    total.finish()
    wanted = sum((one.double() @ other.double() for one, other in parts), torch.zeros(8, 24, device=test_device()))
    _near(destination.values, wanted.to(dtype), dtype)


class _Created(TorchDispatchMode):
    """Elements of every tensor that operations make new memory for."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        self.elements += [t.numel() for t in tree_leaves(result)
                          if torch.is_tensor(t) and t.untyped_storage().data_ptr() not in given]  # fmt: skip
        return result


def test_a_linear_layers_backward_makes_nothing_of_the_size_of_a_tile():
    weight = torch.nn.Parameter(_random(96, 64))
    tiles = Tiles("weight", weight, weight.shape, [(0, 40), (40, 80), (80, 96)], [], None)
    x = _random(3, 64, seed=1).requires_grad_()
    for tile in tiles:
        tile.parameter.grad = torch.zeros_like(tile.parameter)  # as the engine's memory
    out = functions.linear(x, tiles)
    given = torch.ones_like(out)
    with _Created() as created:
        out.backward(given)
    assert created.elements and max(created.elements) <= 3 * 96
    wanted = torch.ones(3, 96, device=test_device()).t() @ x.detach()
    _near(torch.cat([tile.parameter.grad for tile in tiles]), wanted, torch.float32)


COUNTS = [[2, 0, 3, 0, 0, 0, 4], [1] * 7, [0] * 7, [0, 5, 0, 0, 1, 0, 0], [0, 0, 0, 9, 0, 0, 0]]


def _grouped(counts, dtype, transposed, earlier):
    """Output and gradients of seven groups in tiles of three; two rows belong to none."""
    weight = torch.nn.Parameter(_random(7, *((16, 24) if transposed else (24, 16)), dtype=dtype))
    x = _random(sum(counts) + 2, 16, dtype=dtype, seed=1).requires_grad_()
    tiles = Tiles("weight", weight, weight.shape, [(0, 3), (3, 6), (6, 7)], [], None)
    if earlier:
        for tile in tiles:
            tile.parameter.grad = torch.ones_like(tile.parameter)
    out = functions.grouped_linear(x, tiles, counts, transposed)
    out.backward(_random(*out.shape, dtype=dtype, seed=2))
    return out.detach(), x.grad, torch.cat([tile.parameter.grad for tile in tiles])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_are_those_of_each_group(dtype, transposed):
    for counts, earlier in itertools.product(COUNTS, (False, True)):
        found = _grouped(counts, dtype, transposed, earlier)
        weight = _random(7, *((16, 24) if transposed else (24, 16)), dtype=dtype).requires_grad_()
        x = _random(sum(counts) + 2, 16, dtype=dtype, seed=1).requires_grad_()
        matrices = weight if transposed else weight.mT
        parts = [rows @ matrices[i] for i, rows in enumerate(x[:-2].split(counts))]
        out = torch.cat([*parts, x.new_zeros(2, 24)])
        out.backward(_random(*out.shape, dtype=dtype, seed=2))
        wanted = out.detach(), x.grad, weight.grad + (1.0 if earlier else 0.0)
        for mine, theirs in zip(found, wanted):
            _near(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_grouped_product_and_one_product_a_group_have_the_same_bits(dtype, transposed, monkeypatch):
    if test_device().type != "cpu":
        pytest.skip("a GPU's grouped product is another kernel than its products")
    for counts in COUNTS:
        each = _grouped(counts, dtype, transposed, False)
        with monkeypatch.context() as patch:
            patch.setattr(functions, "has_grouped_product", lambda *tensors: True)
            together = _grouped(counts, dtype, transposed, False)
        assert all(torch.equal(one, other) for one, other in zip(each, together)), counts


def test_groups_know_their_rows_from_sorted_members():
    members = torch.tensor([0, 0, 2, 2, 2, 5, 7, 7], device=test_device())  # 7 stands for none of seven
    groups = functions.Groups.of_sorted(members, 7)
    assert groups.bounds == [0, 2, 2, 5, 5, 5, 6, 6] and groups.rows == 6
    part = functions.Members(groups, 2, 6)
    assert part.rows == slice(2, 6) and part.each == [(0, slice(0, 3)), (3, slice(3, 4))]
    assert part.ends.tolist() == [3, 3, 3, 4]
