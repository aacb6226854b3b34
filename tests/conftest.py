"""Which tests run: a covering selection of every matrix, or with ``--exhaustive`` all of them.

A test that is parametrised over several things and runs on ranks has a product of cases. Of these
the default run takes so few that each shows values that the cases before it did not, three at most:
a model or an option that a test leaves out occurs in other tests. Conformance, in classes, takes as
many as show all values. A test over numbers of ranks alone runs on three, where no two neighbours
are the same rank and little divides evenly, and every second test on one other number, in turn.
Classes marked ``variants`` inherit their tests: each test is taken by one of the classes, in turn.
Tests that need no ranks run whole, and so do those marked ``complete``: other tests read the files
that they leave, or each case shows something else. What is marked ``exhaustive`` runs with the
option alone.

Four ranks and more share the cores of a small machine: a test on so many takes a single case, with
values that the tests of its file before it have not met yet.
"""

import gc
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from drivetrain.testing.plugin import _POOL
from left_behind import Remains
from reserved_ports import reserved_port
from two_at_a_time import pytest_runtest_protocol  # noqa: F401 - a hook

TELLING = (3, 2)
"""Numbers of ranks at which most mistakes show, the best first."""

MANY, CASES_ON_MANY = 4, 1
"""On that many ranks, and more, tests share the cases of a file; each takes so many."""

MOST_CASES = 3
"""Cases of a test on fewer ranks."""


Fact = tuple[Hashable, Hashable]
"""A parametrisation, or "ranks", and its value in a case."""


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every case of every matrix, and the tests marked exhaustive",
    )


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
    named = any("[" in argument for argument in config.args)
    if config.getoption("--exhaustive") or named:
        return
    chosen = set(selected(items))
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]


def pytest_collection_finish(session):
    """Take all tests and modules out of garbage collections: each would walk through them."""
    gc.collect()
    gc.freeze()


def selected(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what the default run takes."""
    matrices = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            owner = item.getparent(pytest.Module) if varies(item) else item.parent
            matrices[owner, item.function.__qualname__].append(item)
    turns: Counter[pytest.Collector] = Counter()
    taken: Counter[pytest.Collector] = Counter()
    met: defaultdict[Path, set[Fact]] = defaultdict(set)
    for (owner, name), matrix in matrices.items():
        chosen = matrix
        if any(map(ranks_of, matrix)) and matrix[0].get_closest_marker("complete") is None:
            facts = facts_of(matrix)
            wanted = set().union(*facts.values())
            turns[owner] += not wanted
            fewest, most = 1, MOST_CASES
            if min(map(ranks_of, matrix)) >= MANY:
                fewest, most = min(CASES_ON_MANY, len(matrix)), CASES_ON_MANY
                wanted = {fact for fact in wanted if fact not in met[matrix[0].path]}
                met[matrix[0].path] |= wanted
            elif not varies(matrix[0]):
                turn = None if wanted else turns[owner]
                wanted |= {("ranks", n) for n in counts_for(matrix, turn)}
            cases = covering(facts, wanted, fewest, taken, name)
            chosen = list(cases if matrix[0].cls else itertools.islice(cases, most))
        taken.update(item.parent for item in chosen)
        yield from chosen


def varies(item: pytest.Item) -> bool:
    """Whether the class of a test is one of several that share its tests."""
    return item.get_closest_marker("variants") is not None


def ranks_of(item: pytest.Item) -> int:
    """Return on how many ranks a test runs; 0 for a test without ranks."""
    mark = item.get_closest_marker("ranks")
    return 0 if mark is None else mark.args[0]


def counts_for(matrix: Sequence[pytest.Item], turn: int | None) -> Iterator[int]:
    """Yield the numbers of ranks that must occur: all, or in turn one or two of them."""
    counts = sorted({ranks_of(item) for item in matrix})
    if turn is None:
        yield from counts
        return
    telling = next(n for n in (*TELLING, *counts) if n in counts)
    yield telling
    others = [n for n in counts if n != telling]
    if others and turn % 2:
        yield others[turn // 2 % len(others)]


def covering(
    facts: Mapping[pytest.Item, set[Fact]],
    wanted: set[Fact],
    fewest: int,
    taken: Mapping[pytest.Collector, int],
    name: str,
) -> Iterator[pytest.Item]:
    """Yield cases, some at least, until all that is wanted has occurred.

    The next case is the one with the most that is still missing; among equals two or three ranks
    come first, then the class that took the fewest tests, then values that occurred least. Where
    several are left the name of the test decides, so that tests over the same parameters meet them
    in different combinations.
    """
    left = {item: {*values, ("ranks", ranks_of(item))} for item, values in facts.items()}
    seen: Counter[Hashable] = Counter()
    missing = set(wanted)
    while missing or len(facts) - len(left) < fewest:
        item = min(
            left,
            key=lambda item: (
                -len(left[item] & missing),
                ranks_of(item) not in TELLING,
                taken[item.parent] + seen[item.parent],
                sum(seen[fact] for fact in left[item]),
                zlib.crc32(f"{name}{item.name}".encode()),
            ),
        )
        found = left.pop(item)
        seen.update([item.parent, *found])
        missing -= found
        yield item


def facts_of(matrix: Sequence[pytest.Item]) -> dict[pytest.Item, set[Fact]]:
    """Return the parameters of each case with their values, without those that say its ranks."""
    facts: dict[pytest.Item, set[Fact]] = {item: set() for item in matrix}
    # One id per parametrisation: values that were listed together stay together.
    rows = [item.callspec._idlist if hasattr(item, "callspec") else () for item in matrix]
    names = [str(mark.args[0]) for mark in matrix[0].iter_markers("parametrize")]
    if len(names) != len(rows[0]):
        names = [f"parameter {place}" for place in range(len(rows[0]))]
    for name, values in zip(names, zip(*rows, strict=False), strict=True):
        pairs = set(zip(values, map(ranks_of, matrix), strict=True))
        counts = {n for _, n in pairs}
        says_ranks = len(pairs) == len(set(values)) == len(counts)
        if len(set(values)) > 1 and not says_ranks:
            for item, value in zip(matrix, values, strict=True):
                facts[item].add((name, value))
    return facts
