"""The states of an optimizer of the user's that rest on a drive. They come to the host for the update of their unit,
and go back after it."""

import torch

from .client_optimizer import SegmentStates, WholeStates, lend_parts, members_of

_BLOCK = "_strata_block"  # attribute of what stands for a state that is on the drive


def run_on_shards(sharded, engine):
    """Lets ``sharded.inner`` update this rank's fp32 masters, which become the parameters of its groups."""
    parts = DriveStates if "nvme" in engine._config.states_tiers else SegmentStates
    states = WholeStates if sharded.takes_whole else parts
    members = members_of(sharded, engine)
    engine.core.segment_states = states(sharded.inner, engine.core, members, engine.world_size)
    lend_parts(engine.core.segment_states, engine)


class DriveStates(SegmentStates):
    """The optimizer over this rank's parts, some of which the engine lends during their unit's update only.

    Each step calls the optimizer once for all parts that rest elsewhere, and once for each unit on the drive. Between
    the calls a state with one entry an element is on the drive, and a tensor without memory of its own stands for it.
    Those who read such a state get a copy.
    """

    def _lend(self, core):
        super()._lend(core)
        self._units = dict(core.parts_on_drive())
        for _, index, weight in core.segments():
            if index in self._units:
                self._parameters[index].data = weight  # a larger unit has got a larger buffer for all
        if not hasattr(self, "_blocks"):
            self._blocks = {}  # {(index, name): (block, dtype)}

    def _batches(self):
        by_unit = {}
        for index, parameter in self._parameters.items():
            by_unit.setdefault(self._units.get(index), []).append((index, parameter))
        for members in by_unit.values():
            yield [parameter for _, parameter in members]
            self._put_away([index for index, _ in members])

    def _update(self, gradients):
        lent = zip(self._indices, gradients, strict=True)
        at_work = [index for index, gradient in lent if gradient is not None and index in self._units]
        self._bring(at_work)
        try:
            super()._update(gradients)
        finally:
            self._put_away(at_work)

    def _bring(self, indices):
        for index in indices:
            kept = self._inner.state.get(self._parameters[index], {})
            for name, value in kept.items():
                if hasattr(value, _BLOCK):
                    kept[name] = self._read(value)

    def _put_away(self, indices):
        core = self._core()
        for index in indices:
            kept = self._inner.state.get(self._parameters[index], {}) if index in self._units else {}
            for name, value in kept.items():
                if not self.is_by_element(index, value) or hasattr(value, _BLOCK):
                    continue
                flat = value.detach().to("cpu").contiguous()
                block, dtype = self._blocks.get((index, name), (None, None))
                if dtype != flat.dtype:
                    block = core.shelf_add(f"{core.parameter_name(index)}.{name}", flat.nbytes)
                    self._blocks[index, name] = block, flat.dtype
                core.shelf_put(block, flat)
                kept[name] = torch.zeros(1, dtype=flat.dtype).expand(flat.numel())
                setattr(kept[name], _BLOCK, block)

    def _read(self, value):
        there = torch.empty(value.numel(), dtype=value.dtype)
        self._core().shelf_bring(getattr(value, _BLOCK), there)
        return there

    def put(self, index, values):
        super().put(index, values)
        if index in self._parameters:
            self._put_away([index])

    def own(self, index, value):
        return super().own(index, self._read(value) if hasattr(value, _BLOCK) else value)

    def set_part(self, index, name, values):
        self._bring([index] if index in self._units else [])
        try:
            super().set_part(index, name, values)
        finally:
            self._put_away([index])
