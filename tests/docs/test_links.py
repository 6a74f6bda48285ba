"""Every relative link in README.md and docs/ leads to a file that is there, and every anchor to a heading."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```).*?^\1|^    .*?$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them: lower case, marks dropped, blanks to hyphens; a heading again gets a number."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(text if text not in found else f"{text}_{found.count(text)}")
    return set(found)


def broken(page: Path) -> list[str]:
    wrong = []
    for target in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A heading, with marks!\n")
    page.write_text(
        "[a](other.md) [b](other.md#a-heading-with-marks) [c](nowhere.md) [d](other.md#no) [e](#f) ![g](h.png)\n\n# F\n"
        "```\n[in](code.md)\n```\n"
    )
    assert broken(page) == ["nowhere.md", "other.md#no", "h.png"]


def test_every_page_is_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = set(re.findall(r": ([\w-]+\.md)$", text, re.MULTILINE))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}
