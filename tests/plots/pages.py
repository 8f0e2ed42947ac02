"""What a page would load, read with an HTML parser: for tests that nothing leaves the machine."""

from __future__ import annotations

from html.parser import HTMLParser

LOADING = {"src", "href", "data", "action", "poster", "srcset", "xlink:href"}


class Page(HTMLParser):
    """Collects a page's addresses, scripts and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self._inside = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in LOADING]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        into = {"script": self.scripts, "style": self.styles}.get(self._inside, self.text)
        into.append(data)

    def external(self) -> list[str]:
        """Return what is loaded from elsewhere, styles' url() and @import included."""
        outside = [a for a in self.addresses if not a.startswith(("data:", "#"))]
        return outside + [s for s in self.styles if "url(" in s or "@import" in s]
