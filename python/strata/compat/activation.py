"""Makes ``deepspeed`` mean Strata in this process: for ``import``, and for queries about the distribution of that name.

This module imports the standard library alone, and changes only ``sys.meta_path``. ``import strata.compat.deepspeed``
and ``strata run`` call it. So does ``strata-compat.pth`` beside the installed package, at the start of every Python
process whose environment has ``STRATA_COMPAT=deepspeed``; launchers pass the variable to ranks. An installed DeepSpeed
does not change; this process does not see it.
"""

import sys
from importlib.machinery import ModuleSpec

from .identity import NAME, VARIABLE

# Each of these decides at its import whether there is a DeepSpeed, and chooses base classes and names accordingly.
_TOO_LATE = ("transformers.integrations.deepspeed", "accelerate.utils", "trl.import_utils", "lightning.fabric")


def activate():
    """Makes ``deepspeed`` mean Strata. Does nothing the second time.

    Raises:
        ImportError: DeepSpeed itself, or a framework that looks for it, has been imported already; the message names
            it.
    """
    if is_active():
        return
    _require_early()
    sys.meta_path.insert(0, Finder())


def activate_as(name):
    """``activate()`` for the value of STRATA_COMPAT; an empty one asks for nothing.

    Raises:
        ImportError: for a name without a stand-in; and as ``activate``.
    """
    if name not in ("", NAME):
        advice = f"write {VARIABLE}={NAME}, or unset it"
        raise ImportError(f"{VARIABLE}={name}: Strata stands in for '{NAME}' alone; {advice}")
    if name:
        activate()


def is_active():
    """bool: whether ``deepspeed`` means Strata in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def _require_early():
    real = sys.modules.get(NAME)
    if real is not None:
        where = getattr(real, "__file__", None) or "a module made by the program"
        raise ImportError(
            f"'{NAME}' cannot become Strata: DeepSpeed {getattr(real, '__version__', '')} was imported first, from "
            f"{where}. {_ADVICE}"
        )
    early = [name for name in _TOO_LATE if name in sys.modules]
    if early:
        raise ImportError(
            f"'{NAME}' cannot become Strata: '{early[0]}' was imported first, and has decided whether there "
            f"is a DeepSpeed. {_ADVICE}"
        )


_ADVICE = (
    "Write 'import strata.compat.deepspeed' as the first line of the script; or leave the script unchanged, and start "
    f"it by 'strata run', or with {VARIABLE}={NAME} in the environment"
)


class Finder:
    """An entry of ``sys.meta_path`` for the modules below ``deepspeed`` and the metadata of that distribution."""

    def find_spec(self, name, path=None, target=None):
        """The spec of a module of the stand-in; None for names that are not below ``deepspeed``.

        Raises:
            ModuleNotFoundError: for a module of DeepSpeed that the stand-in lacks.
        """
        if name != NAME and not name.startswith(NAME + "."):
            return None
        from .modules import Loader, is_known  # not before the first use

        if not is_known(name):
            raise ModuleNotFoundError(
                f"Strata, which stands in for DeepSpeed here, has no module '{name}'; docs/MIGRATING.md lists what it "
                f"has. Unset {VARIABLE} to use DeepSpeed itself",
                name=name,
            )
        return ModuleSpec(name, Loader(), origin=__file__, is_package=True)

    def find_distributions(self, context=None):
        """[the distribution "deepspeed"], where ``context`` asks for it or for all."""
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower() == NAME:
            from .distribution import Distribution

            yield Distribution()

    def invalidate_caches(self):
        """Does nothing: this finder has no caches."""
