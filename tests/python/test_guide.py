"""The code of README and docs/guide: Python runs on two ranks, page by page; shell lines name commands, flags and files
that exist; configurations are accepted; quoted messages are in the sources."""

import ast
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from launching import RANKS_ON_THE_HOST
from ranks import run_ranks
from strata.config_source import read_config
from test_command_line import find_program
from torch.distributed.run import get_args_parser
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
ELSEWHERE = {"README.md"}  # whose loop test_examples.py runs as a script
# A block that needs a package which the tests do not have is marked: <!-- needs NAME -->.
BLOCK = re.compile(r"^(?:<!-- needs (\w+) -->\n\n)?```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, *languages):
    """[(line, package that it needs, code)] of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(3)), found[1], found[3]) for found in BLOCK.finditer(text)
            if found[2] in languages]


def having(*languages):
    """The pages with blocks of a language, as parameters of a test."""
    pages = [page for page in PAGES if blocks(page, *languages)]
    return pytest.mark.parametrize("page", pages, ids=name_of)


# --- Python -----------------------------------------------------------------------------------------


def run_page(page, folder):
    """On each rank: the page's blocks one after the other, as one program."""
    os.chdir(folder)
    if torch.distributed.is_initialized():  # a page that makes the group itself finds it made
        torch.distributed.init_process_group = lambda *_, **__: None
    tokens = [torch.arange(16) + i for i in range(32)]
    program = {"__name__": "__main__", "dataset": [{"input_ids": row, "labels": row} for row in tokens]}
    for line, package, code in blocks(page, "python"):
        if package is None or importlib.util.find_spec(package):
            code = code.replace("TrainingArguments(", "TrainingArguments(use_cpu=True, ")  # transformers asks for it
            exec(compile("\n" * line + code, name_of(page), "exec"), program)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page.name not in ELSEWHERE],
                         ids=name_of)
def test_the_code_of_a_page_trains_on_two_ranks(page, tmp_path):
    torch.manual_seed(0)
    tiny = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(tiny).save_pretrained(tmp_path / "path/to/model")
    for _, _, document in blocks(page, "json"):
        (tmp_path / "ds_config.json").write_text(document)
    run_ranks(2, run_page, page, tmp_path, timeout=300.0, env=RANKS_ON_THE_HOST)


@having("json")
def test_configurations_are_accepted(page):
    for _, _, document in blocks(page, "json"):
        json.loads(document)
        read_config(document)


def test_names_of_torch_that_a_page_compares_with_exist():
    page = ROOT / "docs/guide/from_fsdp2.md"
    names = re.findall(r"`(torch(?:\.\w+)+)`", page.read_text(encoding="utf-8"))
    assert len(names) >= 8
    for name in names:
        pkgutil.resolve_name(name)
    from torch.distributed.fsdp import FSDPModule, fully_shard  # the methods and arguments beside them

    methods = ("set_requires_gradient_sync", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
    assert all(hasattr(FSDPModule, method) for method in methods)
    assert {"mp_policy", "reshard_after_forward"} <= set(inspect.signature(fully_shard).parameters)


def test_the_program_of_the_cpp_page_calls_what_the_headers_have():
    ((_, _, program),) = blocks(ROOT / "docs/guide/cpp.md", "cpp")
    headers = "\n".join((ROOT / "src" / path).read_text() for path in re.findall(r'#include "(strata/\S+)"', program))
    called = {*re.findall(r"trainer\.(\w+)\(", program), *re.findall(r"strata::torch::(\w+)", program)}
    assert len(called) >= 7 and all(re.search(rf"\b{name}\b", headers) for name in called), called


# --- the shell --------------------------------------------------------------------------------------


def commands_of(script):
    """[[word]] of each command of a shell script, without what starts it on hosts and what follows a pipe."""
    text = re.sub(r"\\\n\s*", " ", script)
    for line in text.split("\n"):
        words = shlex.split(line, comments=True)
        words = words[:words.index("|")] if "|" in words else words
        words = words[1:] if words[:1] == ["srun"] else words
        if words[:2] == ["bash", "-c"]:
            yield from commands_of(words[2])
        elif words:
            yield words


@cache
def help_of(*command):
    done = subprocess.run([find_program(), *command, "--help"], capture_output=True, text=True,
                          env={**os.environ, "STRATA_PYTHON": sys.executable,
                               "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_strata(words):
    """A command's own help, for which some commands start Python, is asked for where the page gives options."""
    assert re.search(rf"^  {words[1]} ", help_of(), re.MULTILINE), f"strata has no command {words[1]}"
    options = words[2:]
    if words[1] == "run":  # the script's own follow it
        options = options[:next(i for i, word in enumerate(options) if word.endswith(".py"))]
    for option in options:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", help_of(words[1])), f"strata {words[1]} has no {option}"


def check_make(words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words[1:]:
        assert "=" in word or word in targets, f"make has no target {word}"


def check_torchrun(words):
    own, rest = get_args_parser().parse_known_args([re.sub(r"\$\w+|\"", "1", word) for word in words[1:]])
    assert rest == []
    if own.no_python:
        assert own.training_script.startswith("build/"), own.training_script
    else:
        assert own.training_script == "train.py" or (ROOT / own.training_script).is_file(), own.training_script


def check_pip(words):
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for asked in re.findall(r"strata-train\[(\w+)\]", " ".join(words)):
        assert asked in extras, f"the package has no extra {asked}"


def check_cmake(words):
    for source in (words[i + 1] for i, word in enumerate(words) if word == "-S"):
        assert (ROOT / source / "CMakeLists.txt").is_file(), source


@pytest.mark.soak
def test_every_command_has_help():
    for command in re.findall(r"^  ([a-z][a-z-]+) ", help_of(), re.MULTILINE):
        help_of(command)


CHECKS = {"strata": check_strata, "make": check_make, "torchrun": check_torchrun, "pip": check_pip,
          "cmake": check_cmake, "ninja": lambda words: None, "export": lambda words: None}  # fmt: skip


@pytest.mark.xdist_group("guide_shell")  # the help of a command, which may start Python, is asked for once
@having("sh", "bash")
def test_shell_lines_name_commands_flags_and_files_that_exist(page):
    for line, _, script in blocks(page, "sh", "bash"):
        for words in commands_of(script):
            assert words[0] in CHECKS, f"line {line}: no check for '{words[0]}'"
            CHECKS[words[0]](words)


# --- messages ---------------------------------------------------------------------------------------


def texts_of_cpp(source):
    """Adjacent literals as one text, with "…" for values."""
    for literals in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', source):
        joined = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals)).replace('\\"', '"')
        yield re.sub(r"\{[^{}]*\}", "…", joined)


def texts_of_python(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_quoted_message_is_in_the_sources():
    texts = [text for path in sorted((ROOT / "src").rglob("*")) if path.suffix in (".h", ".cpp")
             for text in texts_of_cpp(path.read_text(encoding="utf-8"))]
    texts += [text for path in sorted((ROOT / "python").rglob("*.py"))
              for text in texts_of_python(path.read_text(encoding="utf-8"))]
    everything = "\n".join(" ".join(text.split()) for text in texts)
    quoted = [" ".join(code.split()) for _, _, code in blocks(ROOT / "docs/guide/troubleshooting.md", "text")]
    assert len(quoted) >= 20
    for message in quoted:
        pattern = ".*".join(re.escape(part) for part in message.split("…"))
        assert re.search(pattern, everything), f"no message of the sources is:\n{message}"
