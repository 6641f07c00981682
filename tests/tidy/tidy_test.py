"""The rules of this folder find what they are for: each is shown a small tree with one fault in it."""

import sys
import tempfile
import unittest
from pathlib import Path

import file_rules
import include_rules

PARAGRAPH = "// A header of the test: immutable, used by one thread, owned by the test, sizes in bytes.\n"


class TreeTest(unittest.TestCase):
    """Writes files into a fresh root and runs one check over it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text=""):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def assert_finds(self, findings, *words):
        self.assertEqual(len(findings), 1, findings)
        for word in words:
            self.assertIn(word, findings[0])


class IncludeRulesTest(TreeTest):
    def check(self):
        return include_rules.check(self.root)

    def test_a_downward_include_and_one_of_the_same_layer_are_fine(self):
        self.write("src/strata/base/units.h")
        self.write("src/strata/engine/config.h", '#include "strata/base/units.h"\n')
        self.write("src/strata/engine/engine.cpp", '#include "strata/engine/config.h"\n#include <map>\n')
        self.write("python/bindings/module.cpp", '#include "strata/engine/config.h"\n'
                   "#include <torch/extension.h>\n#include <Python.h>\n")
        self.assertEqual(self.check(), [])

    def test_an_upward_include_is_found(self):
        self.write("src/strata/engine/engine.h")
        self.write("src/strata/memory/arena.h", '#include <vector>\n#include "strata/engine/engine.h"\n')
        self.assert_finds(self.check(), "src/strata/memory/arena.h:2", "higher layer engine")

    def test_an_upward_include_by_a_relative_path_is_found(self):
        self.write("src/strata/plan/unit.h")
        self.write("src/strata/memory/unit.h", "")
        self.write("src/strata/base/dtype.h", '#include "strata/plan/unit.h"\n')
        self.assert_finds(self.check(), "src/strata/base/dtype.h:1", "higher layer plan")

    def test_a_cycle_within_a_layer_is_found_once(self):
        self.write("src/strata/plan/a.h", '#include "strata/plan/b.h"\n')
        self.write("src/strata/plan/b.h", '#include "strata/plan/c.h"\n')
        self.write("src/strata/plan/c.h", '#include "a.h"\n')
        self.assert_finds(self.check(), "circle", "a.h -> src/strata/plan/b.h -> src/strata/plan/c.h")

    def test_a_file_that_includes_itself_is_a_cycle(self):
        self.write("src/strata/plan/a.h", '#include "strata/plan/a.h"\n')
        self.assert_finds(self.check(), "circle")

    def test_torch_below_the_torch_layer_is_found(self):
        for header in ("torch/torch.h", "ATen/ATen.h", "c10/util/Exception.h"):
            self.write("src/strata/engine/engine.cpp", f"#include <{header}>\n")
            self.assert_finds(self.check(), "layer engine", header)
            self.write("src/strata/engine/engine.cpp", f'  #  include "{header}"\n')
            self.assert_finds(self.check(), "layer engine", header)

    def test_python_in_the_torch_layer_is_found(self):
        for header in ("Python.h", "pybind11/pybind11.h", "torch/extension.h",
                       "torch/csrc/autograd/python_variable.h", "torch/csrc/utils/pybind.h"):
            self.write("src/strata/torch/hooks.cpp", f"#include <ATen/ATen.h>\n#include <{header}>\n")
            self.assert_finds(self.check(), "layer torch", header)

    def test_a_file_of_no_layer_is_found(self):
        self.write("src/strata/extras/thing.h")
        self.assert_finds(self.check(), "src/strata/extras/thing.h", "no layer")

    def test_an_include_of_what_is_not_there_is_found(self):
        self.write("src/strata/base/units.h", '#include "strata/base/gone.h"\n')
        self.assert_finds(self.check(), "strata/base/gone.h", "not there")


class FileRulesTest(TreeTest):
    def check(self):
        return file_rules.check(self.root)

    def test_a_tidy_file_is_fine(self):
        self.write("src/strata/base/units.h", PARAGRAPH + "#pragma once\n")
        self.write("python/strata/engine.py", '"""The engine."""\n')
        self.assertEqual(self.check(), [])

    def test_a_long_file_is_found(self):
        self.write("src/strata/base/units.cpp", "int x;\n" * 351)
        self.assert_finds(self.check(), "units.cpp:1", "351 lines")

    def test_a_header_without_a_paragraph_is_found(self):
        self.write("src/strata/base/units.h", "#pragma once\n" + PARAGRAPH)
        self.assert_finds(self.check(), "opens with a paragraph")
        self.write("src/strata/base/units.h", "// Units.\n#pragma once\n")
        self.assert_finds(self.check(), "opens with a paragraph")

    def test_a_module_without_a_docstring_is_found(self):
        self.write("python/strata/engine.py", "import os\n")
        self.assert_finds(self.check(), "docstring")

    def test_work_left_behind_is_found(self):
        for word in ("TO" "DO", "FIX" "ME", "for " "now"):
            self.write("src/strata/base/units.cpp", f"int x;  // {word}: more\n")
            self.assert_finds(self.check(), "units.cpp:1", word)

    def test_a_name_that_says_nothing_is_found(self):
        self.write("src/strata/base/file_utils.cpp")
        self.assert_finds(self.check(), "'utils'")
        (self.root / "src/strata/base/file_utils.cpp").unlink()
        self.write("src/strata/common/units.cpp")
        self.assert_finds(self.check(), "'common'")

    def test_a_long_function_is_found_in_cpp_and_in_python(self):
        body = "  x += 1;\n" * 70
        self.write("src/strata/base/units.cpp", "namespace strata {\n\nint Unit::add(\n    int x) const {\n"
                   + body + "}\n}\n")
        self.assert_finds(self.check(), "units.cpp:3", "73 lines")
        self.write("src/strata/base/units.cpp")
        self.write("python/strata/engine.py", '"""E."""\ndef f(x):\n' + "    x += 1\n" * 70)
        self.assert_finds(self.check(), "engine.py:2", "71 lines")


class CppFunctionsTest(unittest.TestCase):
    def test_functions_are_found_at_namespace_and_class_scope(self):
        text = '''\
#define WRAP(x) \\
  do { x } while (0)
namespace a::b {
enum class E : int { kOne, kTwo };
struct S : T {
  S(int v) : v_(v), w_{1, 2}, u_{} {
  }
  int f() const noexcept override {
    if (v_) { return '}'; }
    return 1'000;
  }
  int v_ = 0;
};
template <typename X>
auto g(X x) -> decltype(x.h()) {
  const char* s = "{ // }";  // }
  return [&]() { return x; }();
}
const int table[] = {1, 2};
}
'''
        self.assertEqual(file_rules.cpp_functions(text), [(6, 2), (8, 4), (14, 5)])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
