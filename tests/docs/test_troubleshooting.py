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


def test_all_messages_of_a_file_are_collected():
    found = [
        site for site in raise_sites.collect() if site.file == "src/drivetrain/facade/gradients.py"
    ]
    assert [site.message.partition(", ")[0] for site in found] == [
        "expected a function of each_piece() that leaves .grad to accelerator.backward()",
        "expected backward() with retain_graph alone in each_piece()",
        "expected checkpoints with use_reentrant=False in each_piece()",
        "expected one weighted backward() per micro-batch inside accumulate()",
        "expected a weight for every loss of an accumulation window or for none",
        "expected a backward of each model in the last micro-batch of an accumulation window",
        "expected gradients to be clipped and optimizers to step after each_piece()",
        "expected no clipping with offload.in_backward: true",
        "expected the loss as a 0-d tensor",
        "expected a scalar loss",
        "expected a loss that requires grad",
    ]
    assert {(site.error, site.code) for site in found} == {("UsageError", 1)}
