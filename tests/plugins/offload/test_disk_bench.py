"""``drivetrain disk-bench``: what it measures, suggests and leaves behind."""

import json

import pytest

from drivetrain_launch.cli import run
from drivetrain_offload import nvme
from drivetrain_offload.nvme import Speed, suggest, usable_bytes

QUICK = ("--mib", "2", "--request-mib", "0.25", "--threads", "1", "--threads", "4")


def test_json_and_table(tmp_path, capsys):
    assert run(["disk-bench", str(tmp_path), *QUICK, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(tmp_path)
    assert said["bytes"] == 2 * 2**20
    forms = [(row["request_mib"], row["threads"]) for row in said["measured"]]
    assert forms == [(0.25, 1), (0.25, 4)]
    rates = [row[f"{name}_bytes_per_s"] for row in said["measured"] for name in ("read", "write")]
    assert min(rates) > 1e5
    (best,) = [row for row in said["measured"] if row.items() >= said["suggested"].items()]
    expected = pytest.approx(12e9 / best["both_bytes_per_s"])
    assert said["step_s_per_billion_parameters"] == expected
    assert list(tmp_path.iterdir()) == []
    assert run(["disk-bench", str(tmp_path), *QUICK]) == 0
    out = capsys.readouterr().out
    first, heads, *rows = out.splitlines()
    assert first.startswith(f"{tmp_path} (")
    assert first.endswith(", 2 MiB")
    assert " ".join(heads.split()) == "request MiB threads read GB/s write GB/s both GB/s"
    assert [row.split()[:2] for row in rows[:2]] == [["0.25", "1"], ["0.25", "4"]]
    assert "suggested  request_mib: 0.25, threads: " in out
    assert "s per billion parameters and rank at least" in out


def test_every_byte_is_moved_as_often_as_it_is_counted(tmp_path, monkeypatch):
    moved = {"read": 0, "write": 0}
    real = nvme.DiskFile._move

    def counted(self, call, view, at, verb):
        moved[verb] += len(view)
        real(self, call, view, at, verb)

    monkeypatch.setattr(nvme.DiskFile, "_move", counted)
    nvme.measure(tmp_path, 3 * 2**20, 0.5, 2)
    # write: to fill, alone, half of it beside reads; read: alone, half of it beside writes
    assert moved == {"read": 4.5 * 2**20, "write": 7.5 * 2**20}
    monkeypatch.setattr(nvme, "_seconds", lambda file, start: [t.wait() for t in start()] and 1)
    found = nvme.measure(tmp_path, 2**20, 0.5, 2)
    assert (found.read, found.write, found.both) == (2**20, 2**20, 2**19)


def speed(both, request_mib=1.0, threads=8):
    return Speed(request_mib=request_mib, threads=threads, read=1e9, write=1e9, both=both)


def test_few_threads_are_suggested_where_more_bring_little_and_no_more_than_there_is_room_for():
    fast = speed(1.00e9, threads=16)
    enough = speed(0.97e9, threads=4, request_mib=4.0)
    same = speed(0.98e9, threads=4, request_mib=16.0)
    assert suggest([speed(0.9e9, threads=2), fast, same, enough]) is enough
    assert suggest([speed(0.5e9, threads=2), fast]) is fast
    assert fast.step_s(2e9) == pytest.approx(24.0)
    assert usable_bytes(2**20, 2**30) == 2**20
    assert usable_bytes(2**30, 10_000_000) == 10_000_000 * 9 // 10 // 8192 * 8192


def test_mistakes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, code, says in (
        (("gone",), 2, "gone: expected a directory, found nothing"),
        ((".", "--mib", "1", "--request-mib", "4"), 2, "raise --mib"),
        ((".", "--threads", "0"), 2, "threads: expected 1 to 256, found 0"),
        ((".", "--request-mib", "0.3"), 2, "request_mib: expected a multiple of 4096"),
    ):
        assert run(["disk-bench", *arguments]) == code
        assert says in capsys.readouterr().err
