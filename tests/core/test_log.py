"""Logging that knows the rank, and the line that called it."""

import io
import logging
from contextlib import redirect_stderr

import pytest
import torch.distributed as dist

from drivetrain.log import get_logger, rank_prefix


def listen():
    """Return a handler at the logger of the tests, and the list of records that it keeps."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("drivetrain.test_log").addHandler(handler)
    return handler, records


@pytest.fixture
def collected():
    handler, records = listen()
    yield records
    logging.getLogger("drivetrain.test_log").removeHandler(handler)


def test_one_process_logs_as_usual(collected, capsys):
    logger = get_logger("drivetrain.test_log", log_level="info")
    logger.info("step %d", 3)
    logger.debug("hidden")
    logger.error("in order", in_order=True)
    logger.warning("everywhere", main_process_only=False, extra={"color": "red"})
    assert [record.getMessage() for record in collected] == ["step 3", "in order", "everywhere"]
    assert collected[2].color == "red"
    assert rank_prefix() == ""
    for level, said in ((logging.NOTSET, "a\n"), (logging.WARNING, ""), (logging.INFO, "")):
        logging.getLogger("drivetrain.test_log").setLevel(level)
        logger.announce("a")
        assert capsys.readouterr().err == said
    assert collected[-1].getMessage() == "a"


def test_records_name_the_line_of_the_caller_and_some_come_once(collected):
    logger = get_logger("drivetrain.test_log", log_level="INFO")
    logger.info("a")
    logger.log(logging.INFO, "b", stacklevel=1)
    logger.warning_once("c")
    assert [record.funcName for record in collected] == [
        "test_records_name_the_line_of_the_caller_and_some_come_once"
    ] * 3

    logger = get_logger("drivetrain.test_log")
    for _ in range(3):
        logger.warning_once("again")
    logger.warning_once("another")
    assert [record.getMessage() for record in collected[3:]] == ["again", "another"]


@pytest.mark.ranks(3)
def test_ranks_have_one_voice_or_all():
    _, records = listen()
    logger = get_logger("drivetrain.test_log", log_level="INFO")
    logger.info("main")
    logger.info("all of %d", 3, main_process_only=False)
    own = [record.getMessage() for record in records]
    rank = dist.get_rank()
    assert own == ["[r0] main"] * (rank == 0) + [f"[r{rank}] all of 3"]
    assert rank_prefix() == f"[r{rank}] "
    logging.getLogger("drivetrain.test_log").setLevel(logging.NOTSET)
    with redirect_stderr(io.StringIO()) as shown:
        logger.announce("once")
    assert shown.getvalue() == "[r0] once\n" * (rank == 0)


@pytest.mark.ranks(3)
def test_in_order(tmp_path):
    logger = logging.getLogger("drivetrain.test_log")
    logger.addHandler(handler := logging.FileHandler(tmp_path / "log"))
    adapter = get_logger("drivetrain.test_log", log_level="INFO")
    if dist.get_rank() == 1:
        logger.setLevel(logging.ERROR)  # still takes part
    adapter.info("turn", in_order=True)
    adapter.error("turn", in_order=True)
    logger.removeHandler(handler)
    handler.close()
    lines = (tmp_path / "log").read_text().split("\n")[:-1]
    assert lines == [f"[r{rank}] turn" for rank in (0, 2, 0, 1, 2)]
