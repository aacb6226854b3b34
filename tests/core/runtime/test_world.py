"""This process's place among all, from variables that may be wrong."""

import multiprocessing

import pytest

from drivetrain.errors import PreflightError, UsageError
from drivetrain.runtime.world import LINK_VARIABLE, World, host_link


def test_a_place_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, said in (
        ("2", r"0 <= RANK < WORLD_SIZE, found RANK=2, WORLD_SIZE=2; start"),
        ("-1", "found RANK=-1, WORLD_SIZE=2"),
        ("x", "an integer in the variable RANK, found 'x'; start"),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(PreflightError, match=said):
            World.discover(cpu=True)


def test_a_process_that_imports_the_script_again_joins_no_ranks(monkeypatch):
    """A loader's spawned worker did, in the place of its rank."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="put what trains under if __name__ == '__main__':"):
        World.discover()


def test_a_measured_link_is_a_number_and_none_is_0(monkeypatch):
    for text, rate in (("", 0.0), ("2.5e9", 2.5e9)):
        monkeypatch.setenv(LINK_VARIABLE, text)
        assert host_link() == rate
    monkeypatch.setenv(LINK_VARIABLE, "quick")
    with pytest.raises(PreflightError, match=f"in the variable {LINK_VARIABLE}, found 'quick'"):
        host_link()
