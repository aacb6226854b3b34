"""Which tests run: a diagonal of every matrix on ranks, or with ``--exhaustive`` all of it.

A test on ranks that is parametrised over several things has a product of cases. The default run
takes the first values of all parameters, then the second values: each shows values that the case
before it did not. Four ranks and more share the cores of a small machine: a test on
so many takes one case. Tests that need no ranks run whole, and so do those marked ``complete``:
other tests read the files that they leave. What is marked ``exhaustive`` is not even collected.

``--share 1234`` runs a share of what the default run leaves out, another one for each number, until
all have been run; after five minutes it begins no further test.
"""

import gc
import multiprocessing
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest

from drivetrain.testing.messages import PRELOADED
from drivetrain.testing.plugin import _POOL
from left_behind import Remains
from reserved_ports import reserved_port
from two_at_a_time import pytest_runtest_protocol  # noqa: F401 - a hook

CASES, CASES_ON_MANY, MANY = 2, 1, 4
"""Cases of a matrix, and those of one on many ranks; how many ranks that is."""

STARTED = pytest.StashKey[float]()
"""When the run began."""

SHARES, SHARE_S = 96, 300.0
"""In how many shares the exhaustive tests come round, and the seconds in which one begins tests."""


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every case of every matrix, and the tests marked exhaustive",
    )
    parser.addoption(
        "--share",
        type=int,
        metavar="N",
        help=f"run share N, modulo {SHARES}, of what the default run leaves out",
    )


def pytest_configure(config):
    if config.getoption("share") is not None:
        config.option.exhaustive = True
    if config.option.exhaustive:
        os.environ["EXHAUSTIVE_TESTS"] = "1"  # for ranks, which know no options of pytest
    # Two processes of tests and their ranks share the cores: threads of one would wait for others'.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.stash[STARTED] = time.monotonic()
    # Programs and ranks are copies of one server: whichever comes first starts it.
    multiprocessing.set_forkserver_preload([*PRELOADED, *config.getini("ranks_preload")])


def pytest_runtest_setup(item):
    late = time.monotonic() - item.config.stash[STARTED] > SHARE_S
    if late and item.config.getoption("share") is not None:
        pytest.skip(f"the {SHARE_S:g} s of this share are over")


def is_exhaustive(marks: Iterable[pytest.Mark]) -> bool:
    return any(mark.name == "exhaustive" for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Make no tests of a function or class that is marked ``exhaustive``."""
    named = collector.config.getoption("exhaustive") or "::" in "".join(collector.config.args)
    return [] if not named and is_exhaustive(getattr(obj, "pytestmark", [])) else None


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine, on which a program of the test may listen and no other process."""
    with reserved_port() as number:
        yield number


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a file whose tests leave processes, listeners, shared memory or files in the tree."""
    stash = request.config.stash
    remains = Remains(lambda: stash[_POOL].store_port if _POOL in stash else 0)
    yield
    left = remains.found()
    assert not left, f"tests of {request.path} left behind: {left}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    share = config.getoption("share")
    everything = config.getoption("exhaustive") or any("[" in each for each in config.args)
    if everything and share is None:
        return
    matrices = defaultdict(list)
    for item in items:
        if not is_exhaustive(item.iter_markers("exhaustive")):
            matrices[item.parent, item.originalname].append(item)
    chosen = {item for matrix in matrices.values() for item in selected(matrix)}
    if share is not None:
        chosen = {each for each in items if each not in chosen and turn_of(each) == share % SHARES}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session):
    """Take all tests and modules out of garbage collections: each would walk through them."""
    gc.collect()
    gc.freeze()


def turn_of(item: pytest.Item) -> int:
    """Return the share that a test belongs to."""
    return zlib.crc32(item.nodeid.encode()) % SHARES


def selected(matrix: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Return what the default run takes of the cases of one test."""
    on_ranks = any(map(ranks_of, matrix))
    if not on_ranks or len(matrix) == 1 or matrix[0].get_closest_marker("complete"):
        return matrix
    few = min(map(ranks_of, matrix)) >= MANY
    return list(diagonal(matrix, CASES_ON_MANY if few else CASES))


def diagonal(matrix: Sequence[pytest.Item], most: int) -> Iterator[pytest.Item]:
    """Yield a case with the first values of all parameters, one with the second values, and so on.

    Where a matrix has gaps, the case that is nearest. A parameter of fewer values repeats them.
    """
    left = list(matrix)
    axes = [
        dict.fromkeys(at[place] for at in map(indices, left))
        for place in range(len(indices(left[0])))
    ]
    for turn in range(min(most, max(map(len, axes)))):
        wanted = [list(axis)[turn % len(axis)] for axis in axes]
        nearest = max(left, key=lambda item: sum(map(int.__eq__, indices(item), wanted)))
        left.remove(nearest)
        yield nearest


def indices(item: pytest.Item) -> Sequence[int]:
    """Return the place of each parameter's value among the values of the parameter."""
    return list(item.callspec.indices.values())


def ranks_of(item: pytest.Item) -> int:
    """Return on how many ranks a test runs; 0 for a test without ranks."""
    mark = item.get_closest_marker("ranks")
    return 0 if mark is None else mark.args[0]
