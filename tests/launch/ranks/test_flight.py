"""Records of torch's flight recorder: two ranks of which one came late, and changes of these."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from drivetrain_launch.ranks.answers import (
    NEWEST,
    RankView,
    answer,
    ask_flights,
    compare,
    newest,
    read_flight,
)

RECORDED = Path(__file__).parent / "recorded"
"""Written by torch 2.13: both ranks finished a sum of 3 numbers, rank 0 waits in one of 7."""


def texts():
    return [(RECORDED / f"flight-rank-{rank}.json").read_text(encoding="utf-8") for rank in (0, 1)]


def found(*records):
    return compare({rank: read_flight(json.dumps(each)) for rank, each in enumerate(records)})


def test_a_rank_that_did_not_enqueue_a_collective():
    assert compare({rank: read_flight(text) for rank, text in enumerate(texts())}) == [
        "rank 1 did not enqueue collective 2 of group '0 default_pg', gloo:all_reduce of (7,)"
    ]


def test_ranks_that_enqueued_different_collectives():
    first, second = (json.loads(texts()[0]) for _ in range(2))
    second["entries"][1] |= {"input_sizes": [[9]], "profiling_name": "nccl:all_gather"}
    (sentence,) = found(first, second)
    assert sentence.startswith("rank 1 enqueued nccl:all_gather of (9,) where others enqueued coll")


def test_a_rank_whose_record_of_the_collective_is_gone_has_enqueued_it():
    first, second = (json.loads(text) for text in texts())
    second["entries"][0] |= {"collective_seq_id": 9}
    (sentence,) = found(first, {**second, "entries": second["entries"][:1]})
    assert sentence.startswith("rank 0: the device has not finished collective 2 of group")


def test_a_device_that_does_not_finish():
    first, second = (json.loads(texts()[0]) for _ in range(2))
    second["entries"][1] |= {"state": "completed"}
    (sentence,) = found(first, second)
    assert sentence.startswith("rank 0: the device has not finished collective 2 of group")


def test_ranks_that_have_finished_everything():
    late = json.loads(texts()[1])
    assert found(late, late) == []


def test_a_text_that_is_no_record():
    with pytest.raises(ValueError, match="flight recorder"):
        read_flight('{"entries": [{"is_p2p": false}]}')


def test_ranks_answer_through_their_pipes(tmp_path):
    board, silent = tmp_path / "rank-0.board", tmp_path / "rank-1.board"
    record = texts()[0].encode()
    threading.Thread(target=answer, args=(board, lambda: record), daemon=True).start()
    while not (tmp_path / "rank-0.ask").exists():
        time.sleep(0.01)
    os.mkfifo(tmp_path / "rank-1.ask")  # nobody reads there
    for _ in range(2):
        assert ask_flights({0: board, 1: silent}) == {0: read_flight(record)}


def test_the_newest_collectives_travel_between_launchers_as_json():
    flights = [read_flight(text) for text in texts()]
    views = [RankView(rank=0, host="n1", pid=7, flight=newest(each)) for each in flights]
    told = [RankView.from_json(json.loads(json.dumps(each.to_json()))).flight for each in views]
    assert told == flights
    assert compare(dict(enumerate(told))) == compare(dict(enumerate(flights)))
    (group, entries), *_ = flights[0].items()
    longer = {group: dict.fromkeys(range(1, 3 * NEWEST), entries[1])}
    assert list(newest(longer)[group]) == [*range(2 * NEWEST, 3 * NEWEST)]
