"""Shards the parameters of complete modules while a model is built: from their values, or from recipes."""

import itertools
import json
import types

import torch

from . import _C
from .model.constructors import ShardedConstruction, discard_failed, is_alone
from .model.model_input import describe_modules, describe_parameters, find_device, make_current
from .model.parameter import (
    clear_owner, is_managed, mark_managed, owner_of, parameter_at, take_ownership, unmark_managed,
)  # fmt: skip
from .model.recording import write_pieces
from .ranks.departure import watch
from .ranks.runtime import make_collectives, rank_and_world_size, notifying_ranks, agree_after

_MOST_AT_ONCE = 1 << 27  # elements of modules that are sharded as one: each such call has several sync points
_POSTPONED = 1 << 24  # elements of small parameters that stay whole until they are sharded together


class DeferredInit:
    """Shards and frees parameters under ``zero.Init``. Every method that shards is collective. A home is a pair
    (module, name of a parameter). A deferred parameter is one without memory, which has a recipe.
    ``values_come_later``: whether later values replace those that constructors write: then many small parameters are
    sharded at once. ``waiting``: modules with parameters that have no memory yet, each once."""

    def __init__(self, config):
        self._config = config
        self.values_come_later, self.waiting = False, []
        self._reads = self._recording = None
        self._postponed, self._postponed_numel = [], 0  # modules with parameters that have values
        self._count = 0
        self._numbers, self._next = {}, itertools.count()  # id(module) -> when its constructor began, in this context
        # Set with the first parameters, whose device is that of all.
        self._device = self._runtime = self._collectives = self._group = None

    def open(self, reads, recording):
        """Begins a context with these ``ConstructorReads`` and this ``Recording``."""
        self._reads, self._recording = reads, recording

    def close(self):
        self._reads = self._recording = None
        self._numbers = {}
        self._device = self._runtime = self._collectives = None  # shards on drives end with their modules

    def begin(self, module):
        """Called when the constructor of ``module`` begins, within those that have not ended."""
        self._numbers[id(module)] = next(self._next)

    def discard(self, module):
        """Called when the constructor of ``module`` has failed: discards the shards that it and the constructors within
        it have made. Modules that were built earlier and only attached keep theirs."""
        number = self._numbers[id(module)]
        self._postponed = [m for m in self._postponed if self._numbers[id(m)] < number]
        where = f"{type(module).__name__}/{number}/{self._count}"
        discard_failed(self._reads.take_failed(number), where, self._device)

    def of_all(self, facts):
        """[bool], whether each of ``facts`` is true on every rank. Collective, unless there are none."""
        if self._collectives is None or not facts:
            return facts
        texts = self._collectives.all_gather_text("".join("01"[fact] for fact in facts))
        return [all(text[i] == "1" for text in texts) for i in range(len(facts))]

    def shard_all(self, module):
        """Shards the parameters that have values, of ``module`` and of all modules below it."""
        self._shard([(m, name) for m in module.modules() for name in m._parameters])
        for m in module.modules():  # a parametrization takes over parameters of another module that are sharded
            if type(m._parameters) is dict and any(p is not None and owner_of(p)[0] for p in m._parameters.values()):
                _read_constructed(m)

    def shard_complete(self, module, is_root):
        """``shard_all`` of a module whose constructor is over, now or together with others. ``is_root``: no other
        constructor runs around it, so the call shards all parameters."""
        if is_root or not self.values_come_later:
            self._postponed, self._postponed_numel = [], 0
            self.shard_all(module)
            return
        self._postponed.append(module)
        own = [p for name in module._parameters if self._has_values(p := parameter_at(module, name))]
        self._postponed_numel += sum(p.numel() for p in own)
        if self._postponed_numel > _POSTPONED:
            modules, self._postponed, self._postponed_numel = self._postponed, [], 0
            self._shard([(m, name) for m in modules for name in m._parameters])

    def shard_unused(self, homes):
        """Shards the parameters at ``homes`` that have values and no other reference on any rank. Returns whether these
        were all that have values."""
        homes = [(m, name) for m, name in homes if self._has_values(parameter_at(m, name))]
        self._connect(homes)
        unused = self.of_all([is_alone(m._parameters, name) for m, name in homes])
        self._shard([home for home, is_unused in zip(homes, unused) if is_unused])
        return all(unused)

    def wait_for(self, module):
        """Keeps a module with deferred parameters of its own for ``shard_waiting()``."""
        own = [p for p in dict.values(module._parameters) if p is not None]
        for deferred, parameter in ((self._recording.deferred(p), p) for p in own):
            if deferred is not None and not deferred.is_all_of(parameter):
                self._recording.materialize(deferred, None)  # a part, which another parameter may share
        if any(self._recording.deferred(p) is not None for p in own):
            self.waiting.append(module)
            _read_constructed(module)

    def shard_waiting(self, root):
        """Shards the deferred parameters below ``root``, and those of waiting modules that a rank still refers to."""
        modules = list(root.modules())
        known = {id(m) for m in modules}
        others, self.waiting = [m for m in self.waiting if id(m) not in known], []
        dropped = self.of_all([is_alone(others, place) for place in range(len(others))])
        modules += [m for m, is_dropped in zip(others, dropped) if not is_dropped]
        each = [[(m, name) for name in m._parameters if self._is_deferred(parameter_at(m, name))] for m in modules]
        groups = list(_joined(each))
        recipes = self._agreed_recipes([home for group in groups for home in group])
        replayed = []  # (parameter, its DeferredTensor)
        try:
            for group in groups:
                self._replay([home for home in group if self._is_deferred(parameter_at(*home))], recipes, replayed)
        except BaseException:  # every rank has one: makes the parameters deferred again, and frees their shards
            for parameter, _ in replayed:
                self._reads.drop(owner_of(parameter)[0])
                clear_owner(parameter)
                unmark_managed(parameter)
            for parameter, deferred in replayed:  # the core that had their shards has ended, and left them empty
                parameter.data = deferred.tensor.detach()
            raise
        for _, deferred in replayed:
            self._recording.forget(deferred)

    def _agreed_recipes(self, homes):
        """{id(parameter): rank 0's recipe}."""
        parameters = list({id(parameter_at(*home)): parameter_at(*home) for home in homes}.values())
        deferred = [self._recording.deferred(p) for p in parameters]
        self._connect(homes)
        if self._collectives is None or not parameters:
            return {id(p): u.recipe for p, u in zip(parameters, deferred)}
        texts = self._collectives.all_gather_text(json.dumps([u.recipe.steps() for u in deferred]))
        recipes = json.loads(texts[0])
        sizes = [len(json.loads(text)) for text in texts]
        if len(set(sizes)) > 1:
            raise _C.UsageError("zero.Init: every rank builds the same modules; found parameters without memory on "
                                f"ranks 0, 1, ...: {sizes}. Let constructors do the same on all ranks")
        return {id(p): _C.Recipe.from_steps(steps) for p, steps in zip(parameters, recipes)}

    def _connect(self, homes):
        """With the first of all ``homes``: chooses the device and connects the ranks."""
        if self._device is not None or not homes:
            return
        with notifying_ranks():
            device = make_current(find_device(self._config, _Flat(homes)))
        if rank_and_world_size()[1] > 1:
            self._collectives, self._group = make_collectives(self._config, device), object()
            runtime = _C.Runtime(device, threads=1, world_size=1).joined(self._collectives)
            with agree_after(self._collectives, "making room for the weights"):
                self._runtime = runtime.storing(self._config)
        self._device = device

    def _shard(self, homes):
        """Shards the parameters at ``homes`` that have values and are not sharded yet. Those of modules that were built
        outside the context get a core of their own, since they outlive a constructor that fails."""
        built = [(m, name) for m, name in homes if id(m) in self._numbers]
        if built and len(built) < len(homes):
            self._shard([(m, name) for m, name in homes if id(m) not in self._numbers])
            homes = built
        homes = [(m, name) for m, name in homes if self._has_values(parameter_at(m, name))]
        if not homes:
            return
        self._connect(homes)
        tree = _Flat(homes)
        if self._collectives is None:
            for _, parameter in tree.parameters:
                parameter.data = parameter.data.to(self._device, self._config.weight_dtype(parameter.dtype))
                mark_managed(parameter, parameter.shape)
            return
        parameters = describe_parameters(tree, {})
        self._own(self._make_core(tree, parameters), tree, parameters, homes)

    def _replay(self, homes, recipes, replayed):
        """Shards the parameters at ``homes`` from their recipes; adds them to ``replayed``."""
        if not homes:
            return
        tree = _Flat(homes)
        deferred = {id(p): self._recording.deferred(p) for _, p in tree.parameters}
        for key, one in deferred.items():
            one.recipe = recipes[key]
        if self._collectives is None:
            for _, parameter in tree.parameters:
                one = deferred[id(parameter)]
                replayed.append((parameter, one))
                dtype = self._config.weight_dtype(parameter.dtype)
                values = torch.empty(parameter.shape, dtype=dtype, device=self._device)
                write_pieces(one, values.view(-1), self._config.partition_stream_chunk, self._config.threads, 1)
                parameter.data = values
                mark_managed(parameter, parameter.shape)
        else:
            parameters = describe_parameters(tree, {}, {id(p): p.shape for _, p in tree.parameters})
            replayed += [(p, deferred[id(p)]) for _, p in tree.parameters]
            recipes = [(i, deferred[id(p)].recipe, p.dtype) for i, (_, p) in enumerate(tree.parameters)]
            core = self._make_core(tree, parameters)
            try:
                core.replay(recipes)
            except BaseException:
                del core  # the traceback would keep it
                raise
            self._own(core, tree, parameters, homes)

    def _make_core(self, tree, parameters):
        name = f"init.{self._count}"
        self._count += 1
        core = _C.ShardedModel(parameters, describe_modules(tree), self._config, "none", self._runtime, name)
        core.collectives = self._collectives  # for those who load values after the context
        watch(core, group=self._group)  # peers may read from it at any time
        return core

    def _own(self, core, tree, parameters, homes):
        take_ownership(core, parameters, stage=3, weakly=False)
        for module in {id(m): m for m, _ in homes}.values():
            _read_constructed(module)
        if self._reads is not None:
            number = min(self._numbers.get(id(m), -1) for m, _ in homes)
            self._reads.add(core, [p for _, p in tree.parameters], [(m._parameters, name) for m, name in homes], number)
        core.free_originals()

    def _is_deferred(self, parameter):
        return _can_be_sharded(parameter) and self._recording.deferred(parameter) is not None

    def _has_values(self, parameter):
        return _can_be_sharded(parameter) and (not self._recording or self._recording.deferred(parameter) is None)


class _Flat:
    """A ModelTree of the parameters at these homes, each once, named after their places. The parameters of a module are
    gathered as one, and apart from other modules': a read of one weight after construction gathers no other module."""

    def __init__(self, homes):
        root, by_module, seen = types.SimpleNamespace(_parameters={}, _modules={}), {}, set()
        self.parameters = []
        for module, name in homes:
            if id(parameter := parameter_at(module, name)) not in seen:
                seen.add(id(parameter))
                self.parameters.append((f"{type(module).__name__}/{name}/{len(self.parameters)}", parameter))
                by_module.setdefault(id(module), {})[name] = parameter
        leaves = [types.SimpleNamespace(_parameters=own, _modules={}, _z3_leaf=True) for own in by_module.values()]
        self.modules = [("", root, None), *((str(number), leaf, root) for number, leaf in enumerate(leaves))]


def _joined(groups):
    """Lists of homes, joined while they have at most ``_MOST_AT_ONCE`` elements; a larger one stays alone."""
    joined, numel = [], 0
    for group in groups:
        own = sum(parameter_at(*home).numel() for home in group)
        if joined and numel + own > _MOST_AT_ONCE:
            yield joined
            joined, numel = [], 0
        joined, numel = joined + group, numel + own
    if joined:
        yield joined


def _read_constructed(module):
    if not isinstance(module._parameters, ShardedConstruction):
        module.__dict__["_parameters"] = ShardedConstruction(dict.items(module._parameters))


def _can_be_sharded(parameter):
    if parameter is None or parameter.is_meta or isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        return False
    return owner_of(parameter)[0] is None and not is_managed(parameter)
