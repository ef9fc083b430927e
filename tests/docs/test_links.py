"""Links of all Markdown pages, offline: files are there, anchors are headings, the site has every page, and no picture
fetches anything."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml

from .commands import REPO, markdown

PENDING = {"DASHBOARD.md", "OBSERVE.md", "RAY.md"}
"""Pages that may be there before the site lists them, or after."""
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What its headings are called, as GitHub and the site call them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        plain = re.sub(r"[^\w\- ]", "", words).strip()
        found |= {plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)}
    return found


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: there is no such heading")
    return wrong


@pytest.mark.parametrize("page", markdown(), ids=lambda page: page.relative_to(REPO).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One: two\n[x](b.md) [y](#one-two) [z](#three) [w](https://elsewhere)\n```\n[q](no.md)\n```\n")
    assert broken(page) == ["b.md: there is no such file", "#three: there is no such heading"]


def test_the_site_lists_every_page_once() -> None:
    listed: list[str] = []

    def walk(entry: object) -> None:
        match entry:
            case str():
                listed.append(entry)
            case list():
                for each in entry:
                    walk(each)
            case dict():
                for each in entry.values():
                    walk(each)

    walk(yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {page.relative_to(REPO / "docs").as_posix() for page in (REPO / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) <= pages
    assert pages - set(listed) <= PENDING, "pages that nav of mkdocs.yml lacks"


def test_every_picture_is_used_well_formed_and_fetches_nothing() -> None:
    every = "\n".join(page.read_text(encoding="utf-8") for page in markdown())
    for picture in sorted((REPO / "docs" / "pictures").iterdir()):
        assert f"pictures/{picture.name}" in every, f"{picture.name} is in no page"
        if picture.suffix == ".svg":
            text = picture.read_text(encoding="utf-8")
            ElementTree.fromstring(text)
            namespaces = re.sub(r"http://(?:www\.w3\.org|purl\.org|creativecommons\.org)/[\w./#-]*", "", text)
            assert not re.search(r"https?://|@import|<script", namespaces.replace("http://127.0.0.1", ""))


def test_links_out_of_the_docs_are_paths_on_the_site() -> None:
    space: dict[str, object] = {"__name__": "site_links"}
    exec(compile((REPO / "scripts" / "site_links.py").read_text(encoding="utf-8"), "site_links", "exec"), space)
    hook = space["on_page_markdown"]
    assert callable(hook)
    deep, flat = (SimpleNamespace(file=SimpleNamespace(src_uri=uri)) for uri in ("howto/a.md", "a.md"))
    text = "[deploy/x.yaml](../deploy/x.yaml) and [the table](../README.md#measured)"
    assert hook(text, page=flat) == "`deploy/x.yaml` and the table (`README.md`)"
    assert hook("[a](../CANARY.md)", page=deep) == "[a](../CANARY.md)"
