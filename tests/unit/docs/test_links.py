"""Links between documents lead somewhere, and the map of docs/ is whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)

_FENCE = re.compile(r"^(```+).*?^\1 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets of links, those in code left out."""
    return _LINK.findall(_CODE.sub("``", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    seen: dict[str, int] = {}
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Relative links of a page that lead nowhere."""
    for link in links(text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(text if not path else target.read_text()):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page, page.read_text())) == []


@pytest.mark.parametrize("folder", ["docs", "docs/adr"])
def test_the_map_names_every_page(folder: str) -> None:
    here = ROOT / "docs"
    named = {(here / link).resolve() for link in links((here / "README.md").read_text())}
    missing = {
        path.name for path in (ROOT / folder).glob("*.md") if path.resolve() not in named
    } - {"README.md", "0000-template.md"}
    assert not missing


def test_decisions_in_the_map_have_their_own_titles() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(": ")
        if number != "0000":
            assert f"| [{number}](adr/{path.name}) | {title} |" in text


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Some `code`, and more\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    text = (
        "# Here\n[a](other.md) [b](other.md#some-code-and-more) [c](other.md#twice-1) [d](#here)\n"
        "[e](https://example.org/x) `[f](gone.md)`\n```\n[g](gone.md)\n# no heading\n```\n"
        "[h](gone.md) [i](other.md#gone) [j](#no-heading)\n"
    )
    page.write_text(text)

    assert list(dead_links(page, text)) == [
        "gone.md: no such file",
        "other.md#gone: no such heading",
        "#no-heading: no such heading",
    ]
