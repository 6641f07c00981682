"""GatheredParameters: whole parameters for a while, to read or to change."""

import torch

from ._owner import owner_of


class GatheredParameters:
    """Context in which parameters are whole on every rank.

    Collective when ``modifier_rank`` is given, or when ranks gather through a process group; every rank
    must then enter with the same parameters. Contexts nest; duplicates, None and parameters that no engine
    owns are let through.

    Args:
        params: a Parameter, or an iterable of Parameters.
        modifier_rank: the rank whose changes count: at the end what it holds becomes everybody's value, in
            the weights and the fp32 master weights. None: read only; changes are lost at the end.
        fwd_module: accepted for DeepSpeed's sake; parameters used by other modules are gathered as they are
            read.
        enabled: False makes the context do nothing.

    Raises:
        UsageError: ``modifier_rank`` is not a rank of the job.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self._modifier_rank = modifier_rank
        self._by_core = {}
        if not enabled:
            return
        for parameter in [params] if isinstance(params, torch.Tensor) else params:
            core, index = owner_of(parameter)
            if core is not None:
                self._by_core.setdefault(id(core), (core, set()))[1].add(index)

    def __enter__(self):
        self._held = []
        for core, indices in self._by_core.values():
            indices = sorted(indices)
            core.gather(indices)
            self._held.append((core, indices))
        return self

    def __exit__(self, kind, value, traceback):
        held, self._held = self._held, []
        published = False
        try:
            if kind is None and self._modifier_rank is not None:
                for core, indices in held:
                    core.publish(indices, self._modifier_rank)
                published = True
        finally:
            for core, indices in held:
                core.release(indices, not published)  # half a change must not stay in the gathered copies
        return False
