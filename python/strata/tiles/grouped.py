"""Products of rows that are ordered by group, each group with its own matrix: one grouped product where the device has
a kernel for it, else one product for each group. Both ways give the same bits where their kernels do.
"""

import torch

_MOST_GROUPS = 1023  # of one grouped product of torch


class Groups:
    """Which rows belong to which group: those up to ``ends[0]`` to the first, those up to ``ends[1]`` to the next; rows
    behind the last end to none.

    Attributes:
        ends: int32 tensor [groups], on the rows' device.
    """

    def __init__(self, ends):
        self.ends = ends.int()
        self._host, self._copied, self._bounds = None, None, None
        if ends.is_cuda:  # the copy runs while the host queues more work
            self._host = torch.empty(ends.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(self.ends, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @staticmethod
    def of_counts(counts, device):
        """Groups by ``counts``, [int]: the rows of each."""
        return Groups(torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0))

    @staticmethod
    def of_sorted(members, groups):
        """Groups by ``members``: each row's group, ascending; a number of ``groups`` or more belongs to none."""
        return Groups(torch.searchsorted(members, torch.arange(groups, device=members.device), right=True))

    @property
    def bounds(self):
        """[int]: 0 and ``ends``. The first call waits for the device, since the host decides on the rows of a tile's
        product, and whether the rank needs the tile at all."""
        if self._bounds is None:
            if self._copied is not None:
                self._copied.synchronize()
            ends = self.ends if self._host is None else self._host
            self._bounds = [0, *ends.tolist()]
        return self._bounds

    @property
    def rows(self):
        """int: the number of rows that belong to a group."""
        return self.bounds[-1]

    def of(self, begin, end):
        """``Members`` of the groups [begin, end)."""
        return Members(self, begin, end)


class Members:
    """The rows of neighbouring groups.

    Attributes:
        rows: slice of all rows.
        each: [(group, counted from the first of these, slice of ``rows``)] without groups that have none.
        count: int, groups.
    """

    def __init__(self, groups, begin, end):
        bounds = groups.bounds[begin : end + 1]
        first = bounds[0]
        self.rows, self.count = slice(first, bounds[-1]), end - begin
        self.each = [(group, slice(bounds[group] - first, bounds[group + 1] - first))
                     for group in range(self.count) if bounds[group] < bounds[group + 1]]  # fmt: skip
        self.ends = groups.ends[begin:end]
        if first:
            self.ends = self.ends - first

    def multiply(self, rows, matrices, out):
        """``out = rows @ matrix of the row's group``.

        Args:
            rows: [rows, k], of these groups.
            matrices: [groups, k, n].
            out: [rows, n].
        """
        if has_grouped_product(rows, matrices):
            out.copy_(torch.nn.functional.grouped_mm(rows, matrices, offs=self.ends))
            return
        for group, here in self.each:
            torch.mm(rows[here], matrices[group], out=out[here])

    def multiply_transposed(self, one, other, place):
        """Writes the gradient of the groups' matrices, ``one.t() @ other`` of each group's rows, to a
        ``GradientTarget``."""
        if not self.each:
            place.add_nothing()
            return
        if has_grouped_product(one, other):
            place.add(torch.nn.functional.grouped_mm(one.t(), other, offs=self.ends))
            return
        used = dict(self.each)
        for group in range(self.count):
            if group in used:
                place.add_product(one[used[group]].t(), other[used[group]], group)
            else:
                place.add_nothing(group)


def has_grouped_product(rows, other):
    """Whether torch has one kernel for the grouped product: in bf16, on some GPUs. Elsewhere torch's grouped product is
    a loop that waits for the offsets, which the host already has here.

    Args:
        rows: [rows, k].
        other: [groups, k, n], or [rows, n].
    """
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device)[0] not in (9, 10):
        return False
    if rows.dtype != torch.bfloat16 or other.dtype != torch.bfloat16 or not rows.is_contiguous():
        return False
    # It reads 16 bytes at once.
    sizes = [*rows.shape[1:], *other.shape[1:]]
    aligned = all(size % 8 == 0 for size in sizes) and all(t.data_ptr() % 16 == 0 for t in (rows, other))
    return aligned and (other.dim() == 2 or len(other) <= _MOST_GROUPS)
