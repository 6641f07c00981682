"""Names of DeepSpeed that Strata does not offer: they can be imported, and inherited from, and say so when used."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why a name is not offered."""

    what: str  # "pipeline parallelism"
    instead: str = ""  # a whole sentence


def refused(name, refusal):
    """A class in the place of ``name``, which may also be called as a function.

    Args:
        name: the full name, "deepspeed.pipe.PipelineModule".
        refusal: a ``Refusal``.
    """
    return _Refused(name.rpartition(".")[2], (), {"_refused": (name, refusal), "__doc__": _text(name, refusal)})


def refused_method(name, refusal):
    """A method in the place of ``name``, which raises NotImplementedError."""

    def method(self, *args, **kwargs):
        raise NotImplementedError(_text(name, refusal))

    method.__name__, method.__doc__ = name.rpartition(".")[2], _text(name, refusal)
    return method


def _text(name, refusal):
    return f"{name}: Strata does not offer {refusal.what}. " + (
        refusal.instead or "Use DeepSpeed itself for it: start without STRATA_COMPAT and 'strata run'."
    )


class _Refused(type):
    """The class of such classes: they have no instances, and nothing is one.

    Raises:
        NotImplementedError: at a call, and where a method or another attribute is asked for.
    """

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(_text(*cls._refused))

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(_text(*cls._refused))
