"""Loops: ways in which scripts touch what a strategy divides, equal to one process or refused.

Every way is taken under each strategy, by default a share of the ways; with ``--exhaustive`` all.
The page ``results.md`` says which are refused.
"""

from pathlib import Path

import pytest

from cells import EQUAL, REFUSED, read_results
from loops_table import STRATEGIES, all_ways
from way_kit import run_on_rank

PAGE = Path(__file__).with_name("results.md")

ALWAYS = {
    "gradients kept from the first step",
    "gradients compared with those before",
    "norms of cleared gradients",
    "unscaled by torch",
    "blocks scale gradients in hooks",
    "a forward keeps its block",
}
"""Ways that no other test takes, and that end in another part of each strategy."""


def ends_as_the_page_says(names, strategy):
    shown = read_results(PAGE, STRATEGIES)
    found = {name: run_on_rank(all_ways()[name], STRATEGIES[strategy]) for name in names}
    wrong = {
        name: outcome for name, outcome in found.items() if outcome.kind != shown[name, strategy]
    }
    assert not wrong


@pytest.mark.complete
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.ranks(2)
def test_ways_end_as_the_page_says(strategy):
    """Every sixth way, another sixth for the next strategy; where ranks share a replica a third."""
    every = 3 if strategy in {"tp2", "pp2"} else 6
    first = list(STRATEGIES).index(strategy) % every
    ends_as_the_page_says({*list(all_ways())[first::every], *ALWAYS}, strategy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.ranks(2)
def test_every_way_ends_as_the_page_says(strategy):
    ends_as_the_page_says(list(all_ways()), strategy)


def test_the_page_shows_every_cell_and_no_failure():
    shown = read_results(PAGE, STRATEGIES)
    assert shown.keys() == {(way, strategy) for way in all_ways() for strategy in STRATEGIES}
    assert set(shown.values()) == {EQUAL, REFUSED}
