"""The messages of the troubleshooting page are those of the code, with class and exit code."""

import re

import raise_sites
from doc_pages import DOCS
from drivetrain import errors

PAGE = (DOCS / "troubleshooting.md").read_text()
ROW = re.compile(r"^\| `([^`]+)` \| `(\w+)` (\d) \|", re.MULTILINE)
ROWS = ROW.findall(PAGE)


def matching(message: str) -> list[raise_sites.RaiseSite]:
    """Return the places in the code whose message has this part."""
    pattern = ".*".join(re.escape(part) for part in message.split(raise_sites.VALUE))
    return [site for site in raise_sites.collect() if re.search(pattern, site.message)]


def test_messages_are_in_the_code_with_class_and_exit_code():
    wrong = [
        (message, error, code)
        for message, error, code in ROWS
        if (error, int(code)) not in {(site.error, site.code) for site in matching(message)}
    ]
    assert wrong == []
    assert matching("expected a scalar loss, found … elephants") == []


def test_every_row_is_read_and_every_class_is_there():
    table_lines = [line for line in PAGE.splitlines() if re.match(r"\| `[^`]+` \| `\w+` ", line)]
    assert len(ROWS) == len(table_lines) > 20
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {error for _, error, _ in ROWS} == classes - {"DrivetrainError", "ClassVar"}
