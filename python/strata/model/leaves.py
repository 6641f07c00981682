"""Leaf modules of DeepSpeed's stage 3: the engine gathers such a module as one at its forward, with all that it
contains. They suit modules of which each batch uses other parts, such as experts, and very fine-grained modules.

A script marks leaves before ``strata.initialize``, which reads the marks; ``zero_optimization.leaf_module`` of the
configuration names more. The engine gathers the blocks that it finds by itself as one anyway, with leaves in them, and
modules that are compiled before ``strata.initialize``."""

__all__ = ["get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
           "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module"]  # fmt: skip


def z3_leaf_module(model):
    """bool: whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model):
    """[torch.nn.Module]: the marked ones of the model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model, flag):
    """Marks this module, or with ``flag=False`` removes its mark."""
    model._z3_leaf = flag


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Marks the modules of these classes: a list of classes, whose subclasses count too, or of their names ("Experts",
    or "package.module.Experts"); TypeError for anything else. Returns [torch.nn.Module] that were found; ValueError
    where there is none, unless ``raise_if_not_found=False``."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Removes marks; arguments and errors as of ``set_z3_leaf_modules``."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    """Marks modules by their names in ``model.named_modules()``. Returns (modules, names without a module); ValueError
    for the latter, unless ``raise_if_not_found=False``."""
    return _mark_named(model, module_names, flag, raise_if_not_found, lambda path, name: path == name)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    """Marks modules by the ends of their names; as ``set_z3_leaf_modules_by_name``."""
    return _mark_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def mark_leaves_of(model, section):
    """Marks the modules that ``zero_optimization.leaf_module`` of a configuration, a dict, names, for scripts that read
    the marks. The engine itself reads the configuration."""
    set_z3_leaf_modules(model, section.get("classes", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, section.get("names", ()), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, section.get("name_suffixes", ()), raise_if_not_found=False)


def _mark_classes(model, classes, flag, raise_if_not_found):
    if isinstance(classes, (str, type)) or not all(isinstance(cls, (str, type)) for cls in classes):
        raise TypeError(f"leaf modules are given as a list of classes or of their names; found {classes!r}")
    found = [module for module in model.modules() if any(_is_of(module, cls) for cls in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"the model {type(model).__name__} has no module of the classes {list(classes)}; name classes "
                         "that it has, or pass raise_if_not_found=False")
    for module in found:
        module._z3_leaf = flag
    return found


def _is_of(module, cls):
    if isinstance(cls, type):
        return isinstance(module, cls)
    own = type(module)
    return cls in (own.__name__, f"{own.__module__}.{own.__qualname__}")


def _mark_named(model, wanted, flag, raise_if_not_found, fits):
    modules = dict(model.named_modules())
    found, missing = {}, []
    for name in wanted:
        fitting = {path: module for path, module in modules.items() if fits(path, name)}
        found.update(fitting)
        if not fitting:
            missing.append(name)
    if missing and raise_if_not_found:
        raise ValueError(f"the model {type(model).__name__} has no module named {missing}; give names of "
                         "model.named_modules(), or pass raise_if_not_found=False")
    for module in found.values():
        module._z3_leaf = flag
    return list(found.values()), missing
