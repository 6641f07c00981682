"""Names of DeepSpeed that Strata does not offer. Scripts can import them and inherit from them; any use raises."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """The reason why Strata does not offer a name."""

    what: str  # "pipeline parallelism"
    instead: str = ""  # a whole sentence


def refused(name, refusal):
    """A class that stands for ``name``; calls as a function raise, too.

    Args:
        name: the full name, "deepspeed.pipe.PipelineModule".
        refusal: a ``Refusal``.
    """
    return _Refused(name.rpartition(".")[2], (), {"_refused": (name, refusal), "__doc__": _text(name, refusal)})


def refused_method(name, refusal):
    """A method that stands for ``name`` and raises NotImplementedError."""

    def method(self, *args, **kwargs):
        raise NotImplementedError(_text(name, refusal))

    method.__name__, method.__doc__ = name.rpartition(".")[2], _text(name, refusal)
    return method


def _text(name, refusal):
    return f"{name}: Strata does not offer {refusal.what}. " + (
        refusal.instead or "Use DeepSpeed itself for it: start without STRATA_COMPAT and 'strata run'."
    )


class _Refused(type):
    """The class of such classes. They have no instances, and ``isinstance`` is always False.

    Raises:
        NotImplementedError: at a call, and at a read of a method or another attribute.
    """

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(_text(*cls._refused))

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(_text(*cls._refused))
