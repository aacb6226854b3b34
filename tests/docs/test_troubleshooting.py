"""The messages of the troubleshooting page are those of the code, with class and exit code."""

import re
from pathlib import Path

import pytest

import raise_sites
from drivetrain import errors

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
SITES = raise_sites.collect()
ROW = re.compile(r"^\| `([^`]+)` \| `(\w+)` (\d) \|", re.MULTILINE)
ROWS = ROW.findall(PAGE)


def matching(message: str) -> list[raise_sites.RaiseSite]:
    """Return the places in the code whose message has this part."""
    pattern = ".*".join(re.escape(part) for part in message.split(raise_sites.VALUE))
    return [site for site in SITES if re.search(pattern, site.message)]


@pytest.mark.parametrize(("message", "error", "code"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_message_is_in_the_code(message, error, code):
    assert (error, int(code)) in {(site.error, site.code) for site in matching(message)}


def test_every_row_is_read_and_every_class_is_there():
    table_lines = [line for line in PAGE.splitlines() if re.match(r"\| `[^`]+` \| `\w+` ", line)]
    assert len(ROWS) == len(table_lines) > 30
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {error for _, error, _ in ROWS} == classes - {"DrivetrainError", "ClassVar"}


def test_situations_are_those_of_all_messages():
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert titles == [*raise_sites.SITUATIONS, "End"]


def test_an_unknown_message_matches_nothing():
    assert matching("expected a scalar loss, found … elephants") == []


def test_all_messages_of_a_file_are_collected():
    found = [site for site in SITES if site.file == "src/drivetrain/facade/gradients.py"]
    assert [site.message.partition(", ")[0] for site in found] == [
        "expected the loss as a 0-d tensor",
        "expected a scalar loss",
        "expected a loss that requires grad",
    ]
    assert {(site.error, site.code, site.situation) for site in found} == {
        ("UsageError", 1, "Step")
    }


def test_the_page_of_all_messages_has_each_of_them():
    page = raise_sites.page()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "message |" not in line]
    assert len(rows) == len(SITES) > 300


def test_every_place_of_the_situations_exists():
    places = [place for places in raise_sites.SITUATIONS.values() for place in places]
    root = Path(__file__).parents[2]
    assert [place for place in places if not list(root.glob(f"{place}*"))] == []
