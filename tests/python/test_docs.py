"""The targets of the documents' links exist: pages, their headings, and the files of the tree that they name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "bench").glob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
NAMED = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+(?:\.(?:h|cpp|py))?)/?`")
# The folders in which a page's name of a file may begin; "" is the root of the tree.
FOLDERS = ("", "src/strata", "python/strata", "python")


def named(page):
    """The page but for its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def headings_of(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", named(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def is_there(name):
    """Whether the tree has this file, folder, or noun (a file but for its suffix)."""
    for folder in FOLDERS:
        path = ROOT / folder / name.removeprefix("strata/" if folder.endswith("strata") else "")
        if path.exists() or any(path.parent.glob(path.name + ".*")):
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for path, heading in LINK.findall(named(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert not heading or heading in headings_of(target), f"{target.name} has no heading '{heading}'"


@pytest.mark.parametrize("page", [page for page in PAGES if "reference" not in page.parts],
                         ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_are_in_the_tree(page):
    missing = [name for name in NAMED.findall(named(page)) if name.split("/")[0] != "build" and not is_there(name)]
    assert missing == [], "a file was renamed: the page has to follow"


@pytest.fixture(scope="module")
def words_of_the_sources():
    files = [path for suffix in ("*.h", "*.cpp") for path in (ROOT / "src").rglob(suffix)]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_classes_and_functions_that_a_page_names_are_in_the_sources(page, words_of_the_sources):
    for name in re.findall(r"`((?:\w+::)+\w+)`", named(page)):
        unknown = [part for part in name.split("::") if part not in words_of_the_sources]
        assert unknown == [], f"{name} was renamed: the page has to follow"


def test_loops_on_pages_train_a_model_that_from_pretrained_left_in_evaluation():
    loops = [
        block for page in PAGES for block in FENCED.findall(page.read_text(encoding="utf-8"))
        if "from_pretrained" in block and "engine.backward" in block
    ]
    assert len(loops) >= 2 and all(".train()" in block.split("engine.backward")[0] for block in loops)


def test_the_sites_navigation_has_every_page_once():
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = sorted(page.relative_to(ROOT).as_posix() for page in PAGES)
    assert sorted(navigation) == pages, "a page came, went or was renamed: mkdocs.yml has to follow"


def test_a_site_with_links_that_lead_nowhere_is_refused(tmp_path):
    (tmp_path / "index.html").write_text('<h1 id="top"></h1><a href="#top"><a href="sub/#here"><a href="gone/">'
                                         '<img src="https://other.host/x.png"><a href="sub/#absent">')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<h1 id="here"></h1><a href="../#top">')
    command = [sys.executable, ROOT / "tools" / "check_site.py", tmp_path]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 1
    gone, loaded, absent = checked.stdout.splitlines()
    assert gone.endswith("gone/ is not there") and "other hosts" in loaded and absent.endswith("no anchor 'absent'")
