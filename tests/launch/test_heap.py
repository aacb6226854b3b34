"""Memory that ranks free stays with them, unless the user has other wishes."""

import pytest
from drivetrain_launch.heap import heap_variables

from drivetrain.config import LaunchConfig

NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

# New pages in 16 rounds of freeing and allocating 100 MiB, as a step does, after warming up.
FAULTS = """
import resource
import torch

def rounds(count):
    for _ in range(count):
        kept = [torch.ones(1 << 18) for _ in range(100)]
        del kept

rounds(5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rounds(16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


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


def test_a_rank_gets_no_new_pages_for_memory_that_it_freed(sandbox):
    script = sandbox.script(FAULTS)
    done = sandbox.launch("--nproc-per-node", "1", "--cpu", script)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2000, "freed memory went back to the system"
