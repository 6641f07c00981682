"""Where a configuration comes from: a dict, JSON, or Hjson, which DeepSpeed reads too."""

import base64
import binascii
import json
import os

from . import _C


def read_config(config):
    """A _C.Config.

    Args:
        config: a dict; or text or a path, as str or os.PathLike: JSON, a file of it, or base64 of it; Hjson or a file
            of it, where the package ``hjson`` is installed.

    Raises:
        ConfigError: the configuration is none of these, or is wrong.
    """
    if isinstance(config, dict):
        return _C.Config.parse(_json_of(config))
    if not isinstance(config, (str, os.PathLike)):
        raise _C.ConfigError(
            f"config must be a dict, a path or JSON text; found {type(config).__name__}. Pass config=..."
        )
    source = os.fspath(config)
    try:
        return _C.Config.parse(source)
    except _C.JsonSyntaxError as error:
        return _C.Config.parse(_json_of(_read_hjson(source, error)))


def shown(config, path):
    """What a _C.Config says at ``path`` of what this rank prints or writes: its default where nothing is given."""
    return json.loads(config.shown[path])


def require_monitors(config, rank):
    """Raises ConfigError on rank 0, which writes metrics, where a package that a _C.Config asks for is missing."""
    if rank == 0 and config.shown_given:
        from .monitoring.monitor import enabled_monitors
        from .monitoring.writers import require_packages

        require_packages(enabled_monitors(config))


def _json_of(document):
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise _C.ConfigError(
            f"the configuration holds what JSON cannot say; write numbers and texts: {error}"
        ) from None


def _read_hjson(source, problem):
    """The document in Hjson; ``problem`` says why it is not JSON."""
    try:
        import hjson
    except ImportError:
        raise _C.ConfigError(
            f"{problem}; if it is Hjson, install the package that reads it: pip install hjson"
        ) from None
    if os.path.isfile(source):
        with open(source, encoding="utf-8") as file:
            source = file.read()
    try:
        return hjson.loads(source, object_pairs_hook=_without_duplicates)
    except hjson.HjsonDecodeError as error:
        raise _C.ConfigError(f"{problem}; it is not Hjson, either: {error}") from None


def _without_duplicates(pairs):
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _C.ConfigError(f"{twice}: the key is given twice in the configuration; keep one of the two")
    return result


def document_of(config):
    """The dict of a configuration: the same one, if it is one.

    Args:
        config: dict, path, JSON text, or base64 of that.

    Raises:
        ConfigError: it is none of these; where it is JSON, Strata's parser says what is wrong with it.
    """
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise _C.ConfigError(f"config must be a dict, a path or JSON text; found {type(config).__name__}")
    read_config(config)  # whose messages say more than Python's
    text = os.fspath(config)
    if os.path.isfile(text):
        with open(text, encoding="utf-8") as file:
            text = file.read()
    for source in (text, _decoded(text)):
        try:
            return json.loads(source)
        except (TypeError, ValueError):
            continue
    import hjson  # which read_config has read it with

    return hjson.loads(text)


def _decoded(text):
    try:
        return base64.urlsafe_b64decode(text)
    except (binascii.Error, ValueError):
        return None
