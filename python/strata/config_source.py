"""The sources of a configuration: a dict, JSON, or Hjson, which DeepSpeed reads, too; the values of its settings."""

import json
import os

from . import _C


def read_config(config, read=_C.Config.parse):
    """A _C.Config. ConfigError where the configuration is none of these, or is wrong. ``config``: a dict; or a str or
    os.PathLike: JSON, base64 of JSON, or the path of a JSON file; where the package ``hjson`` is installed, also Hjson
    or the path of an Hjson file. ``read``: another function of all of these but dicts and Hjson."""
    if isinstance(config, dict):
        return read(_json_of(config))
    if not isinstance(config, (str, os.PathLike)):
        raise _C.ConfigError(
            f"config must be a dict, a path or JSON text; found {type(config).__name__}. Pass config=...")
    source = os.fspath(config)
    try:
        return read(source)
    except _C.JsonSyntaxError as error:
        return read(_json_of(_read_hjson(source, error)))


def shown(config, path):
    """The value at ``path`` of a _C.Config, a setting of what a rank prints or writes; its default where not given."""
    return json.loads(config.shown[path])


def settings_of(config):
    """{path: JSON} of the settings of a _C.Config that have an effect, defaults included."""
    return dict(line.split(" = ", 1) for line in config.digest().splitlines())


def section_of(settings, path):
    """{name: value} of the settings below ``path`` in {path: JSON}."""
    start = f"{path}."
    return {name[len(start):]: json.loads(text) for name, text in settings.items() if name.startswith(start)}


def _json_of(document):
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        raise _C.ConfigError(
            f"the configuration holds what JSON cannot say; write numbers and texts: {error}") from None


def _read_hjson(source, problem):
    """The document in Hjson; ``problem`` says why it is not JSON."""
    try:
        import hjson
    except ImportError:
        raise _C.ConfigError(
            f"{problem}; if it is Hjson, install the package that reads it: pip install hjson") from None
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
    """The dict of a configuration: the same one, if it is one. ``config``, and errors otherwise: of ``read_config``."""
    return config if isinstance(config, dict) else json.loads(read_config(config, _C.Config.document))


def add_config_arguments(parser):
    """Adds ``--deepspeed`` (a flag for the script itself) and ``--deepspeed_config`` to an ``argparse`` parser;
    ``strata.initialize(args=...)`` reads the latter. Scripts use these names. Returns ``parser``."""
    group = parser.add_argument_group("Strata", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine; for the script's own use")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    return parser
