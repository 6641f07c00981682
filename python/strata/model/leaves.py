"""Leaf modules of DeepSpeed's stage 3: modules that are gathered as one when they are entered, with all that they
contain. For modules of which each batch uses other parts, such as experts, and for very fine-grained ones.

A leaf is marked before ``strata.initialize``, which reads the marks; ``zero_optimization.leaf_module`` of the
configuration names more. Blocks that the engine finds by itself are gathered as one anyway, with leaves inside them.
"""


def z3_leaf_module(model):
    """bool: whether the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def get_z3_leaf_modules(model):
    """[torch.nn.Module]: the marked ones of the model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model, flag):
    """Marks this module, or takes its mark away."""
    model._z3_leaf = flag


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Marks the modules of these classes.

    Args:
        model: a ``torch.nn.Module``.
        leaf_module_classes: a list of classes, whose subclasses count too, or of their names: "Experts", or
            "package.module.Experts".
        raise_if_not_found: False: there may be none.

    Returns:
        [torch.nn.Module] that were found.

    Raises:
        ValueError: there is none.
        TypeError: what is no list of classes or names.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Takes marks away; as ``set_z3_leaf_modules``."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    """Marks modules by their names in ``model.named_modules()``.

    Returns:
        (modules, names that there are none of).

    Raises:
        ValueError: there is none of a name.
    """
    return _mark_named(model, module_names, flag, raise_if_not_found, lambda path, name: path == name)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    """Marks modules by how their names end; as ``set_z3_leaf_modules_by_name``."""
    return _mark_named(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def mark_leaves_of(model, section):
    """Marks the modules that ``zero_optimization.leaf_module`` of a configuration, a dict, names: for scripts that ask.
    The engine has read the configuration itself."""
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
