"""Writes docs/reference: Python from the docstrings of the package, C++ from the public headers. `make reference` runs
it; a test compares the pages with its result.

    PYTHONPATH=<a build's pkg> python tools/reference.py
"""

import functools
import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
WRITTEN = "<!-- Written by `make reference`; change the {} instead. -->"

MODULES = {  # module: its public names; None: those of __all__, or all that it defines
    "strata": None,
    "strata.zero": None,
    "strata.nn": None,
    "strata.tiles": ["TilingRule"],
    "strata.schedule": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"],
    "strata.utils": None,
    "strata.utils.zero_to_fp32": None,
    "strata.ops.adam": None,
    "strata.ops.adagrad": None,
    "strata.ops.lion": None,
    "strata.integrations.transformers": ["StrataTrainer", "StrataTrainerMixin"],
}
TOLD_BY = {"strata.utils": "strata.parameter_states"}  # whose docstring opens a module's part, where not its own
PARTS = {  # classes of which an engine is made: the title of their names
    "Engine": "Training",
    "EngineCheckpoints": "Checkpoints",
    "EngineWeights": "Weights and reports",
    "StateOffload": "Freeing the device for a while",
    "Batches": "Batches",
    "EngineSettings": "Settings",
    "EngineNames": "Other names of DeepSpeed's engine",
}
HEADERS = (  # a program's own, then the contracts of the engine
    "torch/trainer.h", "torch/scoped_call.h", "torch/rank_environment.h", "base/error.h", "base/units.h",
    "base/dtype.h", "engine/engine.h", "forecast/memory_forecast.h", "checkpoint/reader.h", "checkpoint/writer.h",
    "device/device.h", "comm/collectives.h", "io/io_engine.h", "offload/state_store.h",
)
SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Errors|Methods):$")


# --- docstrings -------------------------------------------------------------------------------------


def markdown(docstring):
    """A docstring as Markdown: its sections as lists, indented examples as code."""
    lines = re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(docstring), flags=re.DOTALL).split("\n")
    text, section, is_code = [], None, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if SECTION.match(line):
            section = line.rstrip(":")
            text += ["", f"**{section}**", ""]
        elif not line.strip():
            text.append("")
        elif indent == 0:
            text += ["```", ""] * is_code
            section, is_code = None, False
            text.append(re.sub(r"::$", ":", line))
        elif section is None:
            text += [] if is_code else ["", "```python"]
            is_code = True
            text.append(line[4:])
        elif indent == 4 and section != "Returns":
            text.append(_item(line.strip()))
        else:
            text.append(line.strip() if section == "Returns" else f"  {line.strip()}")
    text += ["```"] * is_code
    linked = re.sub(r"docs/([\w/]+)\.md", r"[\1](../\1.md)", "\n".join(text))
    return in_paragraphs(re.sub(r"\n{3,}", "\n\n", linked).strip())


def in_paragraphs(text):
    """The text with paragraphs of more than 120 words broken at the ends of sentences."""
    blocks = []
    for block in text.split("\n\n"):
        if len(block.split()) <= 120 or block.lstrip().startswith(("-", "`" * 3, "|")):
            blocks.append(block)
            continue
        parts = [[]]
        for sentence in re.split(r"(?<=[.]) (?=[A-Z`])|(?<=[.])\n(?=[A-Z`])", block):
            if len(" ".join(parts[-1]).split()) > 60:
                parts.append([])
            parts[-1].append(sentence)
        blocks += [" ".join(part) for part in parts]
    return "\n\n".join(blocks)


def _item(line):
    names, colon, rest = line.partition(": ")
    if not colon and line.endswith(":"):
        names, colon = line[:-1], ":"
    if colon and re.fullmatch(r"[\w.*]+(, [\w.*]+)*,?", names):
        return f"- `{names.rstrip(',')}`: {rest}"
    return f"- {line}" if colon else f"  {line}"


def signature_of(name, member):
    """"name(arguments)" without ``self``."""
    try:
        signature = inspect.signature(member)
    except (TypeError, ValueError):
        return f"{name}(...)"
    bound = {"self", *getattr(member, "keywords", ())}  # of a functools.partial
    given = [p for p in signature.parameters.values() if p.name not in bound]
    return name + str(signature.replace(parameters=given, return_annotation=inspect.Signature.empty))


def members_of(cls):
    """{name: member} of a class's own public methods and properties."""
    return {name: member for name, member in vars(cls).items()
            if not name.startswith("_") and (is_value(member) or inspect.isroutine(plain(member)))
            and not _is_torchs_copy(cls, member)}


def _is_torchs_copy(cls, member):
    """Whether torch put an inherited ``step`` into the class, wrapped, as it does when it makes an optimizer of it."""
    function = plain(member)
    return getattr(function, "hooked", False) and not function.__qualname__.startswith(f"{cls.__qualname__}.")


def is_value(member):
    return isinstance(member, (property, functools.cached_property))


def plain(member):
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def documented(name, member, level):
    """The Markdown of one function, class or method under a heading."""
    text = [f"{'#' * level} {name}", ""]
    if not is_value(member):
        text += ["```python", signature_of(name, plain(member)), "```", ""]
    text += [markdown(inspect.getdoc(plain(member)) or ""), ""]
    return text


def table(rows):
    """The Markdown of names with one short paragraph each."""
    cells = [f"| `{head}` | {' '.join(markdown(doc).split())} |".replace("||", "\\|\\|") for head, doc in rows]
    return ["| name | meaning |", "|---|---|", *cells, ""] if rows else []


def short(member):
    doc = inspect.getdoc(plain(member)) or ""
    return len(doc.split()) <= 45 and "\n\n" not in doc and "|" not in doc


def class_page(cls, level):
    """The members of a class: long ones under headings, short ones in a table."""
    own = members_of(cls)
    rows = [(name if is_value(m) else signature_of(name, plain(m)), inspect.getdoc(plain(m)) or "")
            for name, m in own.items() if short(m)]
    text = table(rows)
    for name, member in own.items():
        if not short(member):
            text += documented(name, member, level)
    return text


# --- pages ------------------------------------------------------------------------------------------


def public_names(path):
    """[(name, object)] of a module of the package, in the order of its page."""
    module = importlib.import_module(path)
    names = MODULES[path] or getattr(module, "__all__", None) or [
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == path]
    found = [(name, getattr(module, name)) for name in names]
    return [(name, value) for name, value in found if callable(value)]


def errors_table():
    """The classes of base/error.h with the comment before each."""
    text = (ROOT / "src/strata/base/error.h").read_text(encoding="utf-8")
    text += (ROOT / "src/strata/engine/schedule/loss_scaler.h").read_text(encoding="utf-8")
    found = re.findall(r"((?:^// .*\n)+)(?:struct|class) (\w*Error) ?:", text, re.MULTILINE)
    rows = [("Error", "The base of all that follow, a RuntimeError.")]
    return table(rows + [(name, " ".join(comment.replace("// ", "").split())) for comment, name in found])


def python_page():
    text = ["# Python reference", "", WRITTEN.format("docstrings"), "",
            "Every public name but those of the engine, which has [a page of its own](engine.md). Every rank makes a",
            "call that is *collective*.", ""]
    for path in MODULES:
        text += [f"## {path}", ""]
        if path != "strata":
            text += [markdown(importlib.import_module(TOLD_BY.get(path, path)).__doc__), ""]
        for name, value in public_names(path):
            if inspect.isclass(value) and issubclass(value, Exception):
                continue
            if name == "Engine":
                text += ["### Engine", "", "[The engine](engine.md).", ""]
                continue
            text += documented(name, value, 3)
            if inspect.isclass(value):
                text += class_page(value, 4)
        if path == "strata":
            text += ["### Errors", "", *errors_table()]
    return "\n".join(text)


def engine_page():
    engine = importlib.import_module("strata.engine")
    weights = importlib.import_module("strata.engine_weights")
    homes = {**vars(importlib.import_module("strata.checkpoint.engine_checkpoints")), **vars(weights), **vars(engine)}
    text = ["# The engine", "", WRITTEN.format("docstrings"), "",
            "`strata.initialize` and `strata.load_pretrained` return a `strata.Engine`, a `torch.nn.Module`.", "",
            markdown(engine.Engine.__doc__), ""]
    for part, title in PARTS.items():
        cls = homes[part]
        own = type(part, (), {name: member for name, member in members_of(cls).items()
                              if part != "Engine" or _defined_in(member, engine)})
        text += [f"## {title}", "", *class_page(own, 3)]
    return "\n".join(text)


def _defined_in(member, module):
    """Whether a member of Engine is its own, and not handed to a part of it."""
    function = member.fget if isinstance(member, property) else plain(member)
    if is_value(member) and not inspect.isfunction(function):
        return True  # an attrgetter, or computed once
    return getattr(function, "__module__", None) == module.__name__ and "<locals>" not in getattr(
        function, "__qualname__", "") and "<lambda>" not in getattr(function, "__qualname__", "")


def header_page(path):
    """[str] of one header: its opening paragraph as text, its public part as code."""
    lines = (ROOT / "src/strata" / path).read_text(encoding="utf-8").split("\n")
    opening = list(iter_comment(lines))
    body = lines[len(opening):]
    begin = next(i for i, line in enumerate(body) if line.startswith("namespace"))
    text = ["```cpp", f'#include "strata/{path}"', "", *without_private(body[begin:]), "```", ""]
    said = [re.sub(r"^// ?", "", line) for line in opening]
    return [f"## {path}", "", *as_text(said), "", *text]


def as_text(lines):
    """Comment lines as Markdown: indented ones are code."""
    text, is_code = [], False
    for line in lines:
        indented = line.startswith("  ") and bool(line.strip())
        if indented != is_code and (line.strip() or is_code):
            text += ["", "```text"] if indented else ["```", ""]
            is_code = indented
        elif re.match(r"[A-Z]\w+[.:] ", line) and text and text[-1].strip() and not is_code:
            text.append("")  # "Threads: ...", "Ownership: ..."
        text.append(line)
    return in_paragraphs("\n".join(text + ["```"] * is_code)).split("\n")


def iter_comment(lines):
    for line in lines:
        if not line.startswith("//"):
            return
        yield line


def without_private(lines):
    """The lines but for private sections of classes and the preprocessor's."""
    kept, hidden = [], None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if hidden is not None and line.strip().startswith(("public:", "protected:", "};")) and indent <= hidden:
            hidden = None
        if line.strip() == "private:":
            hidden = indent
        if hidden is None and not line.startswith(("#", "}  // namespace")):
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def cpp_page():
    text = ["# C++ reference", "", WRITTEN.format("headers"), "",
            "The headers that programs include: those of `strata::torch`, then the contracts of the engine, which",
            "`strata::core` has without torch. [The guide](../guide/cpp.md) builds a program. Private parts are left",
            "out.", ""]
    for path in HEADERS:
        text += header_page(path)
    return "\n".join(text)


def versions_page():
    """docs/guide/versions.md with the supported ranges of the code."""
    path = ROOT / "docs/guide/versions.md"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    transformers = importlib.import_module("strata.checkpoint.supported_transformers").requirement()
    torch = re.search(r'dependencies = \[.*?"(torch[^"]*)"', project, re.DOTALL).group(1)
    python = re.search(r'requires-python = "([^"]*)"', project).group(1)
    rows = [f"| Python | `{python}` |", f"| torch | `{torch}` |", f"| transformers | `{transformers}` |"]
    block = "\n".join(["", "| package | supported |", "|---|---|", *rows, ""])
    begin, end = "from the tables in the code -->\n", "<!-- supported: end -->"
    before, rest = path.read_text(encoding="utf-8").split(begin)
    return before + begin + block + "\n" + end + rest.split(end)[1]


def pages():
    """{path: text} of the pages that this program writes."""
    written = {FOLDER / "python.md": python_page(), FOLDER / "engine.md": engine_page(), FOLDER / "cpp.md": cpp_page(),
               ROOT / "docs/guide/versions.md": versions_page()}
    return {path: text.rstrip() + "\n" for path, text in written.items()}


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")


if __name__ == "__main__":
    main()
