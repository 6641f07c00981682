"""``deepspeed.moe.utils``. Strata has none of DeepSpeed's layers of experts, so no model contains one."""


def is_moe_param(param):
    """bool: whether a parameter belongs to DeepSpeed's experts: its ``allreduce`` is False."""
    return getattr(param, "allreduce", True) is False


def has_moe_layers(m):
    """(False, 0): a model has none of DeepSpeed's layers of experts."""
    return False, 0


def is_moe_param_group(param_group):
    """bool: whether a param group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=178956971):
    """[param group]: the same groups, since no parameter belongs to DeepSpeed's experts.

    Args:
        param_groups: a param group, or several.
        max_group_size: accepted for DeepSpeed's sake.

    Raises:
        NotImplementedError: a parameter is one of DeepSpeed's experts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    if any(is_moe_param(p) for group in groups for p in group["params"] if hasattr(p, "allreduce")):
        raise NotImplementedError("Strata does not offer expert parallelism; models' own experts are trained")
    return groups


def configure_moe_param_groups(model_parameters):
    """The same parameters or param groups."""
    return model_parameters
