"""Puts the engine between a model's modules and their parameters, and removes it again."""

from .. import _C


class _Keeper:
    """Holds a core. Where a module with this attribute is copied or pickled, the copy has None instead."""

    def __init__(self, core):
        self.core = core

    def __reduce__(self):
        return type(None), ()


def intercept(core, modules, scopes=True):
    """Wraps the forward of every scope's module and of the model, and the ``_parameters`` of every module that owns
    sharded parameters, so that a read outside any scope gathers. The model, ``modules[0]``, keeps ``core``.

    Args:
        core: a _C.ShardedModel.
        modules: [torch.nn.Module] in the order of the module tree that ``core`` was made of.
        scopes: False wraps no forward; reads alone gather. Else the first module is the model.

    Returns:
        the argument ``undo`` of ``restore``.
    """
    undo = []
    modules[0].__dict__["_strata_core"] = _Keeper(core)
    for scope, module_index in enumerate(core.scopes()):
        if not core.scope_needed(scope):
            continue
        module = modules[module_index]
        undo.append((module, "forward", module.__dict__.get("forward")))
        module.__dict__["forward"] = _C.ScopedForward(core, scope, module.forward)
    if scopes:
        model = modules[0]
        undo.append((model, "forward", model.__dict__.get("forward")))
        model.__dict__["forward"] = _C.RootForward(core, model.forward)
    for module in modules:
        if type(module._parameters) is not dict:
            module.__dict__["_parameters"] = dict(module._parameters)  # replaces that of an earlier engine or zero.Init
        own = [core.index_of(p) for p in module._parameters.values() if p is not None]
        if not any(i >= 0 and core.is_sharded(i) for i in own):
            continue
        plain = module._parameters
        module.__dict__["_parameters"] = _C.ParameterDict(plain)
        _C.attach_parameter_dict(module.__dict__["_parameters"], core)
        undo.append((module, "_parameters", plain))
    return undo


def restore(core, model, undo):
    """Undoes ``intercept``; ``model``: its first module."""
    keeper = model.__dict__.get("_strata_core")
    if keeper is not None and keeper.core is core:  # else it belongs to a later engine
        del model.__dict__["_strata_core"]
    for module, name, value in reversed(undo):
        if name == "_parameters":
            module.__dict__[name] = dict(module.__dict__[name])
        elif value is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value
