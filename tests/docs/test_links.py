"""Relative links of README, CHANGELOG and docs lead to files, and their anchors to headings."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^\s*```.*?^\s*```\s*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Return the targets of a page's links that stay in the repository."""
    targets = LINK.findall(CODE.sub("CODE", FENCE.sub("", page.read_text())))
    return [target for target in targets if "://" not in target]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        assert slug not in found, f"{page.name} has two headings {title!r}"
        found.add(slug)
    return found


def broken(page: Path, target: str) -> bool:
    """Tell whether a link leads nowhere."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return True
    return bool(anchor) and anchor not in anchors(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert [target for target in links(page) if broken(page, target)] == []


def test_there_are_links_to_anchors():
    assert sum("#" in target for page in PAGES for target in links(page)) > 20


@pytest.mark.parametrize("target", ["nowhere.md", "quickstart.md#7-evaluate", "#no-heading"])
def test_broken_links_are_found(target):
    assert broken(ROOT / "docs/cli.md", target)


@pytest.mark.parametrize("target", ["quickstart.md#6-evaluate", "#launch", "strategies/fsdp.md"])
def test_right_links_pass(target):
    assert not broken(ROOT / "docs/cli.md", target)
