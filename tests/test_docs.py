"""The site in docs/: what its pages say runs, their links lead somewhere, and it works offline."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from hooked_ssm import mixers
from tests.browser import body_of, needs_browser
from tests.snippets import blocks, run_python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = {"hooked_ssm": ROOT / "hooked_ssm", "hooked_ssm.tasks": ROOT / "tasks"}

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"\[[^\]]*\]\[([\w.]+)\]")
# What a browser fetches by itself; a link that a reader may click is none of it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|icon|preload|preconnect|manifest))"
    r"[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|<style\b[^>]*>[^<]*(?:@import|url\()\s*[\"']?(?:https?:)?//[^<]*<"
)


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def prose(page: Path) -> str:
    """A page without its code, where brackets are no links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.M)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", title) for title in plain}


def targets(page: Path, *, outside: bool) -> list[str]:
    """Where a page's links and images lead: to other sites, or within this one."""
    found = LINK.findall(prose(page))
    return [target for target in found if bool(urlsplit(target).scheme) == outside]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_code_of_pages_runs(page, tmp_path, monkeypatch):
    """In a folder with the repository's checkpoints and with the files that the page shows."""
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    for block in blocks(page):
        shown = re.search(r'title="(.+?)"', block.options)
        if shown:
            (tmp_path / shown[1]).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    known = dict(mixers.MIXERS)
    try:
        run_python(page)
    finally:
        mixers.MIXERS.clear()
        mixers.MIXERS.update(known)


def docstring_examples() -> list[tuple[str, str, str]]:
    """(module, name, docstring) of every `>>>`; from files, where decorators hide none."""
    found = []
    for package, root in SOURCES.items():
        for path in sorted(root.rglob("*.py")):
            module = ".".join((package, *path.relative_to(root).with_suffix("").parts))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    docstring = ast.get_docstring(node) or ""
                    if ">>>" in docstring:
                        name = getattr(node, "name", "module")
                        found.append((module.removesuffix(".__init__"), name, docstring))
    return found


EXAMPLES = docstring_examples()


@pytest.mark.parametrize(("module", "name", "docstring"), EXAMPLES, ids=[e[1] for e in EXAMPLES])
def test_examples_of_docstrings(module, name, docstring):
    known = dict(vars(importlib.import_module(module)))
    example = doctest.DocTestParser().get_doctest(docstring, known, name, module, 0)
    said: list[str] = []
    failed, attempted = doctest.DocTestRunner().run(example, out=said.append)
    assert attempted and not failed, "".join(said)


def test_some_docstrings_have_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in targets(page, outside=False):
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.is_file() and file.is_relative_to(DOCS), target
        assert not anchor or anchor in anchors(file), target
    for target in targets(page, outside=True):
        parts = urlsplit(target)
        assert parts.scheme == "https" and "." in parts.netloc, target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_references_name_what_the_api_pages_show(page):
    shown = re.findall(
        r"^::: (\S+)$", "".join(p.read_text() for p in (DOCS / "api").glob("*.md")), flags=re.M
    )
    for name in [*REFERENCE.findall(prose(page)), *re.findall(r"^::: (\S+)$", page.read_text())]:
        assert any(name == root or name.startswith(f"{root}.") for root in shown), name
        resolve(name)


def resolve(name: str) -> object:
    """The object of a dotted name: attributes of the longest part that is a module."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def test_every_page_is_in_the_menu():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    assert sorted(listed) == sorted(map(name_of, PAGES))


def test_settings_keep_the_site_offline():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False and "offline" in settings["plugins"]
    own = [*settings["extra"]["polyfills"], *settings["extra_css"]]
    assert all((DOCS / file).is_file() for file in own)


def test_commands_of_pages_exist():
    from typer.main import get_command

    from hooked_ssm.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for line in "".join(block.text for block in blocks(page, "bash")).splitlines():
            words = line.split("#")[0].split()
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, flags=re.M), line
            if words[0] == "hooked-ssm":
                options = {o for p in commands[words[1]].params for o in p.opts}
                assert {w for w in words if w.startswith("--")} <= options, line


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; what mkdocs would only warn of is an error."""
    for needed in ("mkdocs", "material", "mkdocstrings", "griffe"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_built_pages_fetch_nothing(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) == len(PAGES) + 1  # and the one for addresses that do not exist
    for page in pages:
        found = FETCHED.search(page.read_text())
        assert found is None, f"{page.name}: {found and found[0]}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


@needs_browser
def test_search_works_from_the_disk(site, tmp_path):
    """Workers are not allowed there: docs/js/iframe-worker.js stands in for them."""
    page = (site / "concepts" / "views.html").as_uri()
    body = body_of(f"{page}?q=hook_ssm_carry", tmp_path / "profile")
    assert "md-search-result__item" in body and "hooks.html" in body


@pytest.mark.parametrize("package", ["analysis", "ops", "plots", "sweeps", "tasks", "training"])
def test_api_pages_show_every_public_name(site, package):
    text = (site / "api" / f"{package}.html").read_text()
    names = importlib.import_module(f"hooked_ssm.{package}").__all__
    assert [n for n in names if f'id="hooked_ssm.{package}.{n}"' not in text] == []


def test_what_would_be_fetched_is_found():
    for tag in (
        '<script src="https://a.org/x.js"></script>',
        "<img alt=x src=//a.org/x.png>",
        '<link rel="stylesheet" href="https://a.org/x.css">',
        "<style>@import 'https://a.org/x.css';</style>",
    ):
        assert FETCHED.search(tag), tag
    assert not FETCHED.search('<a href="https://a.org">x</a><script src="x.js"></script>')
