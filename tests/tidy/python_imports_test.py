"""The rules about imports within python/strata find what they are for: each is shown a small tree with one fault."""

import sys
import tempfile
import unittest
from pathlib import Path

import python_imports


class PythonImportsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        for package in ("", "views/", "model/", "ranks/", "checkpoint/"):
            self.write(f"{package}__init__.py")

    def write(self, path, text=""):
        target = self.root / "python/strata" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def check(self):
        return python_imports.check(self.root)

    def assert_finds(self, *words):
        findings = self.check()
        self.assertEqual(len(findings), 1, findings)
        for word in words:
            self.assertIn(word, findings[0])

    def test_imports_that_look_down_and_foreign_ones_are_fine(self):
        self.write("__init__.py", "from . import zero\nfrom .engine import Engine\nfrom ._C import Error\n")
        self.write("zero.py")
        self.write("engine.py",
                   "import torch\nfrom . import _C\nfrom .checkpoint.saving import save\nimport strata.zero\n")
        self.write("checkpoint/saving.py", "from .. import _C\nfrom .._C import Error\nfrom ..ranks import joint\n"
                   "from .names import of\nimport strata._C\n")
        self.write("checkpoint/names.py", "import json\n\ndef of():\n    from transformers import modeling\n")
        self.write("ranks/joint.py")
        self.assertEqual(self.check(), [])

    def test_an_import_of_a_higher_room_is_found(self):
        self.write("checkpoint/names.py")
        for statement in ("from ..checkpoint.names import of", "from ..checkpoint import names",
                          "import strata.checkpoint.names", "from strata.checkpoint import names"):
            self.write("model/ownership.py", f'"""Owners."""\n{statement}\n')
            self.assert_finds("python/strata/model/ownership.py:2", "room model", "strata.checkpoint.names",
                              "higher room checkpoint")

    def test_a_room_that_imports_the_root_is_found(self):
        self.write("engine.py")
        self.write("views/table.py", "import sys\nfrom ..engine import Engine\n")
        self.assert_finds("python/strata/views/table.py:2", "strata.engine", "the root")
        self.write("views/table.py", "from .. import __version__\n")
        self.assert_finds("python/strata/views/table.py:1", "imports strata of the root")

    def test_what_is_above_the_root_imports_it_and_not_the_other_way(self):
        self.write("engine.py")
        self.write("compat/__init__.py")
        self.write("compat/engine.py", "from ..engine import Engine\n")
        self.assertEqual(self.check(), [])
        self.write("zero.py", "from .compat import engine\n")
        self.assert_finds("python/strata/zero.py:1", "the root imports strata.compat.engine", "higher room compat")

    def test_an_upward_import_within_a_function_is_found(self):
        self.write("engine.py")
        self.write("model/ownership.py", "def owner():\n    if True:\n        from ..engine import Engine\n")
        self.assert_finds("python/strata/model/ownership.py:3", "strata.engine")

    def test_a_cycle_is_found_once(self):
        self.write("model/a.py", "from .b import x\n")
        self.write("model/b.py", "from . import c\n")
        self.write("model/c.py", "import strata.model.a\n")
        self.assert_finds("circle", "strata.model.a -> strata.model.b -> strata.model.c -> strata.model.a")

    def test_a_cycle_that_a_function_closes_is_found(self):
        self.write("engine.py", "class Engine:\n    def save(self):\n        from .pretrained import save\n")
        self.write("pretrained.py", "from .engine import Engine\n")
        self.assert_finds("circle", "strata.engine -> strata.pretrained -> strata.engine")

    def test_a_module_that_imports_its_package_is_a_cycle(self):
        self.write("__init__.py", "from .engine import Engine\n")
        self.write("engine.py", "from . import __version__\n")
        self.assert_finds("circle", "strata -> strata.engine -> strata")

    def test_a_module_in_no_room_is_found(self):
        self.write("extras/thing.py")
        self.write("engine.py", "from .extras import thing\n")
        rooms = "views, model, tiles, ranks, sequence, monitoring, ops, checkpoint"
        self.assert_finds("python/strata/extras/thing.py:1", "no room", rooms)

    def test_an_import_of_what_is_not_there_is_found(self):
        self.write("engine.py", "from .gone import thing\n")
        self.assert_finds("python/strata/engine.py:1", "strata.gone", "not there")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
