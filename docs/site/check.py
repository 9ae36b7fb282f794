"""Check a built site: it loads nothing from elsewhere, and every link within it leads somewhere.

python docs/site/check.py build/site/_build
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

REMOTE = re.compile(r"(https?:)?//")
# Tags that a browser loads without a click, and the attribute with the address.
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
# A <link> with one of these relations loads nothing.
ONLY_SAID = {"canonical", "author", "license", "search", "index", "next", "prev"}
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
IN_SCRIPT = re.compile(r"""["'`]((?:https?:)?//[^"'`\s]+\.(?:js|mjs|css|woff2?))""")
# Files that themes leave with their scripts, and that no page links to.
UNREAD = {"webpack-macros.html", "sbt-webpack-macros.html"}


class Page(HTMLParser):
    """The addresses that a page loads and links to, and its own anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and the anchor of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.inside = tag
        self.places |= {values[name] for name in ("id", "name") if name in values}
        address = values.get(LOADED.get(tag, ""))
        relation = set(values.get("rel", "").split())
        if address and not (tag == "link" and relation & ONLY_SAID):
            self.loaded.append(address)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])

    def handle_data(self, data: str) -> None:
        """Collect the addresses that an inline style or script loads."""
        if self.inside == "style":
            self.loaded += IN_STYLE.findall(data)
        if self.inside == "script":
            self.loaded += IN_SCRIPT.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Leave a style or script."""
        self.inside = ""


def problems(site: Path) -> list[str]:
    """A line for each fault in the pages and styles of a folder."""
    read = {}
    for file in sorted(site.rglob("*.html")):
        if file.name in UNREAD:
            continue
        read[file.resolve()] = Page(file.read_text(encoding="utf-8"))
    found = []
    for file, page in read.items():
        name = file.relative_to(site.resolve())
        found += [f"{name} loads {it}" for it in page.loaded if REMOTE.match(it)]
        # Links of the theme to a page itself, to be filled by a script, are empty.
        for link in [*page.links, *page.loaded]:
            if link and not re.match(r"[a-z]+:|//", link) and not _leads(link, file, read):
                found.append(f"{name} links to {link}, which is not there")
    for file in sorted(site.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        found += [f"{file.relative_to(site)} loads {it}" for it in IN_STYLE.findall(text)]
    return found


def _leads(link: str, file: Path, read: dict[Path, Page]) -> bool:
    """Whether a link within the site leads to a file, and to a place in it where it names one."""
    path, place = urldefrag(unquote(link))
    target = file
    if path:
        target = (file.parent / path.partition("?")[0]).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    return not place or target not in read or place in read[target].places


def main() -> None:
    """Check the folder that the command names."""
    site = Path(sys.argv[1])
    found = problems(site)
    for line in dict.fromkeys(found):
        print(line)
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
