"""What the documents point at is there: pages and their headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")


def named(page):
    """The page but for its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def headings_of(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+)$", named(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for path, heading in LINK.findall(named(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert not heading or heading in headings_of(target), f"{target.name} has no heading '{heading}'"
