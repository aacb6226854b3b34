"""Which tests run: a covering selection of every matrix, or with ``--exhaustive`` all of them.

A test that is parametrised over several things and runs on ranks has a product of cases. Of these
the default run takes so many that every value of every parameter, and every number of ranks,
occurs. A test over numbers of ranks alone runs on three, where no two neighbours are the same rank
and little divides evenly, and on one other number, which the tests of a class take in turn. Tests
that need no ranks run whole; what is marked ``exhaustive`` runs with the option alone.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import pytest

TELLING = 3
"""The number of ranks at which most mistakes show."""


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every case of every matrix, and the tests marked exhaustive",
    )


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


def selected(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield what the default run takes."""
    cases = defaultdict(list)
    turns: Counter[pytest.Collector] = Counter()
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            cases[item.parent, getattr(item, "originalname", item.name)].append(item)
    for (parent, name), matrix in cases.items():
        counts = sorted({ranks_of(item) for item in matrix})
        if counts[-1] == 0 or len(matrix) == 1:
            yield from matrix
        elif len(counts) == len(matrix):
            turns[parent] += 1
            yield from in_turn(matrix, turns[parent])
        else:
            yield from covering(matrix, name)


def ranks_of(item: pytest.Item) -> int:
    """Return on how many ranks a test runs; 0 for a test without ranks."""
    mark = item.get_closest_marker("ranks")
    return 0 if mark is None else mark.args[0]


def in_turn(matrix: Sequence[pytest.Item], turn: int) -> Iterator[pytest.Item]:
    """Yield the cases of a test over numbers of ranks alone: three ranks, and one other number."""
    others = [item for item in matrix if ranks_of(item) != TELLING]
    if len(others) == len(matrix):
        yield others.pop(turn % len(others))
    yield from (item for item in matrix if ranks_of(item) == TELLING)
    yield others[turn % len(others)]


def covering(matrix: Sequence[pytest.Item], name: str) -> Iterator[pytest.Item]:
    """Yield cases until each value of each parameter, and each number of ranks, has occurred.

    The next case is the one with the most values that are still missing; among equals two or three
    ranks come first, then values that occurred least. Where several are left the name of the test
    decides, so that tests over the same parameters meet them in different combinations.
    """
    facts = {item: set(facts_of(item)) for item in matrix}
    missing = set().union(*facts.values())
    seen: Counter[Hashable] = Counter()
    while missing:
        item = min(
            facts,
            key=lambda item: (
                -len(facts[item] & missing),
                ranks_of(item) not in (2, TELLING),
                sum(seen[fact] for fact in facts[item]),
                zlib.crc32(f"{name}{item.name}".encode()),
            ),
        )
        seen.update(facts[item])
        missing -= facts.pop(item)
        yield item


def facts_of(item: pytest.Item) -> Iterator[Hashable]:
    """Yield the parameters of a case with their values, and its number of ranks."""
    yield "ranks", ranks_of(item)
    # One entry per parametrisation: values that were listed together stay together.
    yield from enumerate(item.callspec._idlist)
