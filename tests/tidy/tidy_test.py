"""The rules of this folder find what they are for: each is shown a small tree with one fault in it."""

import sys
import tempfile
import unittest
from pathlib import Path

import class_rules
import cpp_scopes
import file_rules
import include_rules
import text_rules
import wording_rules

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

    def test_rooms_of_a_layer_include_downward(self):
        self.write("src/strata/comm/collectives.h")
        self.write("src/strata/comm/host/shm.h", '#include "strata/comm/collectives.h"\n')
        self.write("src/strata/engine/config/config.h")
        self.write("src/strata/engine/engine.cpp", '#include "strata/engine/config/config.h"\n')
        self.write("src/strata/engine/checkpoint/saver.cpp", '#include "strata/comm/host/shm.h"\n')
        self.write("src/strata/engine/config/tool/page.cpp", '#include "../config.h"\n')
        self.assertEqual(self.check(), [])

    def test_an_include_of_a_higher_room_is_found(self):
        self.write("src/strata/engine/reduce/reducer.h")
        self.write("src/strata/engine/gather/gatherer.h", '#include "strata/engine/reduce/reducer.h"\n')
        self.assert_finds(self.check(), "gatherer.h:1", "room gather", "higher room reduce")

    def test_an_include_of_the_root_by_a_room_below_it_is_found(self):
        self.write("src/strata/engine/engine.h")
        self.write("src/strata/engine/gather/gatherer.h", '#include "strata/engine/engine.h"\n')
        self.assert_finds(self.check(), "gatherer.h:1", "higher room root")

    def test_an_include_of_a_room_by_a_root_below_it_is_found(self):
        self.write("src/strata/comm/host/shm.h")
        self.write("src/strata/comm/collectives.h", '#include "host/shm.h"\n')
        self.assert_finds(self.check(), "collectives.h:1", "room root", "higher room host")

    def test_a_file_of_no_room_is_found(self):
        self.write("src/strata/torch/extras/thing.h")
        self.assert_finds(self.check(), "src/strata/torch/extras/thing.h:1", "no room of torch")

    def test_a_layer_without_rooms_may_have_folders(self):
        self.write("src/strata/kernels/simd/adam.h")
        self.assertEqual(self.check(), [])

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
        self.write("src/strata/base/units.cpp", "int x;\n" * 601)
        self.assert_finds(self.check(), "units.cpp:1", "601 lines")

    def test_a_product_that_grows_is_found(self):
        self.write("src/strata/base/units.cpp", "int x;\n" * 3)
        self.write("python/strata/engine.py", '"""The engine."""\n')
        self.assertEqual(file_rules.large_product(self.root, 4, 2), [])
        self.assert_finds(file_rules.large_product(self.root, 3, 2), "4 lines", "the most is 3")
        self.assert_finds(file_rules.large_product(self.root, 4, 1), "2 files", "the most is 1")

    def test_a_header_without_a_paragraph_is_found(self):
        self.write("src/strata/base/units.h", "#pragma once\n" + PARAGRAPH)
        self.assert_finds(self.check(), "opens with a paragraph")
        self.write("src/strata/base/units.h", "// Units.\n#pragma once\n")
        self.assert_finds(self.check(), "opens with a paragraph")

    def test_a_module_without_a_docstring_is_found(self):
        self.write("python/strata/engine.py", "import os\n")
        self.assert_finds(self.check(), "docstring")

    def test_a_long_line_of_python_is_found(self):
        self.write("python/strata/engine.py", '"""The engine."""\n' + "x = 1  # " + 111 * "a" + "\n")
        self.assertEqual(self.check(), [])
        self.write("python/strata/engine.py", '"""The engine."""\n' + "x = 1  # " + 112 * "a" + "\n")
        self.assert_finds(self.check(), "engine.py:2", "121 columns")

    def test_words_of_ones_own_for_errno_are_found(self):
        self.write("src/strata/io/file.cpp", "auto a = std::strerror(errno);\nauto b = my_strerror(1);\n")
        self.assert_finds(self.check(), "file.cpp:1", "errno_text")

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


class ClassRulesTest(TreeTest):
    HEADER = "namespace strata {\nclass Unit {\n  void a();\n  struct Impl;\n};\n}\n"

    def check(self):
        return class_rules.check(self.root)

    def source(self, name, text):
        self.write(f"src/strata/base/{name}.cpp", "namespace strata {\n" + text + "}\n")

    def test_a_class_with_one_source_is_fine(self):
        self.write("src/strata/base/unit.h", self.HEADER)
        self.source("unit", "struct Unit::Impl {\n  int x;\n};\nvoid Unit::a() {\n}\n")
        self.source("other", "std::vector<Unit::Impl> copy(const Unit& unit) {\n}\n")
        self.assertEqual(self.check(), [])

    def test_a_class_with_two_sources_is_found(self):
        self.source("unit", "void Unit::a() {\n}\n")
        self.source("unit_rest", "\nint Unit::b(int x) const {\n}\n")
        self.assert_finds(self.check(), "unit_rest.cpp:3", "Unit has functions here", "unit.cpp")

    def test_a_defaulted_function_counts(self):
        self.source("unit", "void Unit::a() {\n}\n")
        self.source("unit_end", "Unit::~Unit() = default;\n")
        self.assert_finds(self.check(), "unit_end.cpp:2", "one .cpp")

    def test_a_class_within_belongs_to_the_one_around_it(self):
        self.source("unit", "void Unit::a() {\n}\n")
        self.source("unit_impl", "void Unit::Impl::run() {\n}\n")
        self.assert_finds(self.check(), "unit_impl.cpp:2", "one .cpp")
        self.source("unit_impl", "struct Unit::Impl {\n};\n")
        self.assert_finds(self.check(), "unit_impl.cpp:2", "one .cpp")

    def test_classes_of_one_name_in_two_namespaces_are_two(self):
        self.source("unit", "namespace io {\nvoid Unit::a() {\n}\n}\n")
        self.source("unit_rest", "namespace plan {\nvoid Unit::a() {\n}\n}\n")
        self.assertEqual(self.check(), [])
        for name in ("unit", "unit_rest"):
            self.source(name, "namespace {\nvoid Unit::a() {\n}\n}\n")
        self.assertEqual(self.check(), [])

    def test_a_template_in_headers_is_fine(self):
        for name in ("unit", "unit_rest"):
            self.write(f"src/strata/base/{name}.h", "template <class T>\nvoid Unit<T>::a() {\n}\n")
        self.assertEqual(self.check(), [])

    def test_a_long_class_is_found(self):
        self.write("src/strata/base/unit.h", self.HEADER + "// About units.\n" * 194)
        self.source("unit", "void Unit::a() {\n}\n" + "int free_function();\n" * 196)
        self.assertEqual(self.check(), [])
        self.source("unit", "void Unit::a() {\n}\n" + "int free_function();\n" * 197)
        self.assert_finds(self.check(), "unit.h:2", "Unit has 401 lines")

    def test_a_long_class_of_python_is_found(self):
        self.write("python/strata/engine.py", "class A:\n" + "    x = 1\n" * 399)
        self.assertEqual(self.check(), [])
        self.write("python/strata/engine.py", "class A:\n" + "    x = 1\n" * 400)
        self.assert_finds(self.check(), "engine.py:1", "A has 401 lines")

    def test_other_classes_of_its_files_do_not_count(self):
        for name in ("A", "B"):
            self.source(name, f"void {name}::run() {{\n}}\n" + "  int free_function();\n" * 100)
        body = "  int x;\n" * 150
        self.write("src/strata/base/unit.h", f"class A {{\n{body}}};\nclass B {{\n{body}}};\n")
        self.assertEqual(self.check(), [])


class TextRulesTest(TreeTest):
    def check(self):
        return text_rules.check(self.root)

    def test_a_long_paragraph_is_found(self):
        for page in ("README.md", "CONTRIBUTING.md", "docs/design/peers.md", "bench/USE.md"):
            self.write(page, "# Title\n\nShort.\n\n" + "Ten words stand in a line, as you can see.\n" * 12)
            self.assertEqual(self.check(), [])
            self.write(page, "# Title\n\nShort.\n\n" + "Ten words stand in a line, as you can see.\n" * 12
                       + "More.\n")
            self.assert_finds(self.check(), f"{page}:5", "121 words")
            (self.root / page).unlink()

    def test_a_long_page_is_found(self):
        for page, most in text_rules.MAX_PAGE_LINES.items():
            self.write(page, "\n" * most)
            self.assertEqual(self.check(), [])
            self.write(page, "\n" * (most + 1))
            self.assert_finds(self.check(), f"{page}:1", f"{most + 1} lines")
            (self.root / page).unlink()

    def test_an_item_of_a_list_is_a_paragraph(self):
        item = " ".join(["word"] * 80)
        self.write("README.md", f"{item}\n- {item}\n- {item}\n  1. {item}\n")
        self.assertEqual(self.check(), [])
        self.write("README.md", f"- {item}\n  {item}\n")
        self.assert_finds(self.check(), "README.md:1", "161 words")

    def test_tables_code_and_pictures_are_no_paragraphs(self):
        line = " ".join(["word"] * 130) + "\n"
        self.write("README.md", f"# {line}\n| {line}```\n{line}```\n<img alt='{line}'>\n")
        self.assertEqual(self.check(), [])


class CppScopesTest(unittest.TestCase):
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

    def test_names_are_found_with_the_scopes_around_them(self):
        text = '''\
namespace strata::io {
class File final : public Base<struct Tag> {
  struct Part { int size; };
  void close();
};
namespace {
template <class T>
struct Hidden {};
}
std::map<std::string, std::function<void(int)>> File::parts(std::span<const File::Part> x) const {
  struct Local {};
}
template <typename T> void File::Part::put(T x) {}
File::operator bool() const { return true; }
bool File::operator()(int x) { return x < 3 && x > 1; }
File::~File() = default;
std::string text_of(File::Part part) { return {}; }
}
'''
        found = [(item.kind[0], "::".join(item.scopes), item.name)
                 for item in cpp_scopes.definitions(text)]
        self.assertEqual(found, [
            ("c", "strata::io::File", "Part"), ("c", "strata::io", "File"),
            ("c", "strata::io::", "Hidden"), ("f", "strata::io", "File::parts"),
            ("f", "strata::io", "File::Part::put"), ("f", "strata::io", "File::operator_"),
            ("f", "strata::io", "File::operator_"), ("f", "strata::io", "File::~File"),
            ("f", "strata::io", "text_of")])


class WordingRulesTest(TreeTest):
    def test_each_form_is_found_where_a_sentence_has_it(self):
        sentences = {
            "nobody, whoever, somebody": "// A buffer that nobody uses.",
            "a sentence that opens with What or Who": "// Done. What is read is kept.",
            "a sentence that opens with Of": "// Of a unit, its weights.",
            "as it is, as they are": "// It stays as it is.",
            "so many": "// At most so many bytes.",
        }
        for form, sentence in sentences.items():
            self.write("src/strata/base/units.h", sentence + "\n// What is a unit? A block, with all of it.\n")
            self.assert_finds(wording_rules.check(self.root), form)

    def test_a_form_that_became_rarer_lowers_its_number(self):
        left = dict.fromkeys(wording_rules.FORMS, 0) | {"so many": 2}
        self.write("docs/page.md", "It takes so many bytes.\n")
        self.assert_finds(wording_rules.check(self.root, left), "lower its number")


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
