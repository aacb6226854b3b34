"""Memory that ranks free stays with them, unless the user has other wishes."""

import pytest

from drivetrain.config import LaunchConfig
from drivetrain_launch.heap import heap_variables

NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_set_on_the_cpu_only():
    assert set(heap_variables(LaunchConfig(), accelerators=0)) == set(NAMES[:2])
    assert not heap_variables(LaunchConfig(), accelerators=2)
    assert not heap_variables(LaunchConfig(keep_memory=False), accelerators=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [(NAMES[0], "65536"), (NAMES[1], "1"), (NAMES[2], "glibc.malloc.arena_max=1")],
)
def test_what_the_user_set_stays(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not heap_variables(LaunchConfig(), accelerators=0)


def test_other_tunables_are_no_wish(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert heap_variables(LaunchConfig(), accelerators=0)


def test_ranks_get_the_variables(sandbox):
    script = sandbox.script(f"import os; print([os.environ.get(name) for name in {NAMES!r}])")
    done = sandbox.launch("--nproc-per-node", "1", "--cpu", script)
    assert done.stdout == "['33554432', '1099511627776', None]\n", done.stderr
    done = sandbox.launch(
        "--nproc-per-node", "1", "--cpu", "--set", "launch.keep_memory=false", script
    )
    assert done.stdout == "[None, None, None]\n", done.stderr
