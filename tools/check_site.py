"""Checks the built site: each link and picture leads to a file of it, and to an anchor that the page has; the site asks
no other host for scripts, styles or pictures. Zensical's strict mode looks at links between pages alone.

    python tools/check_site.py build/site/html
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

LOADED = {"script", "img", "source", "iframe"}  # tags whose targets a browser loads by itself, beside <link>


class Page(HTMLParser):
    """The anchors of one page, and its links: (line, target, whether the browser loads it)."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = {""}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        target = values.get("href") or values.get("src")
        if target:
            loads = tag in LOADED or (tag == "link" and values.get("rel") not in ("canonical", "next", "prev"))
            self.links.append((self.getpos()[0], target, loads))


def findings(root):
    """[str]: one sentence for each link that leads nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for line, link, loads in page.links:
            place = f"{path.relative_to(root)}:{line}"
            if urlsplit(link).scheme or link.startswith("//"):
                if loads and not link.startswith("data:"):
                    found.append(f"{place}: loads {link}; the site is to load nothing from other hosts")
                continue
            target, anchor = urldefrag(unquote(link))
            base = root / target.lstrip("/") if target.startswith("/") else path.parent / target
            file = (base if target else path).resolve()
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file():
                found.append(f"{place}: {link} is not there")
            elif file in pages and anchor not in pages[file].anchors:
                found.append(f"{place}: {link}: that page has no anchor '{anchor}'")
    return found if pages else [f"{root} has no pages; build the site first: make site"]


def main():
    found = findings(Path(sys.argv[1]).resolve())
    print("\n".join(found) if found else "Every link of the site leads somewhere.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
