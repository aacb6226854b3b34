"""The zoo: families of models under every strategy, equal to one process.

A few cells, each of another kind, run by default; with ``--exhaustive`` all of them. The page
``docs/inside/models.md`` says which cells are refused, and is complete.
"""

from pathlib import Path

import pytest

from cells import EQUAL, read_results
from families import FAMILIES
from zoo_cell import STRATEGIES, parts_of, ranks_of, run_on_rank
from zoo_training import in_one_process

PAGE = Path(__file__).parents[2] / "docs/inside/models.md"

FEW = (
    ("bert-pretraining", "ddp"),
    ("gan", "zero1"),
    ("spectral-norm", "zero2"),
    ("mixtral-auxiliary", "zero3"),
    ("checkpointed", "zero3"),
    ("clamped-weights", "fsdp"),
    ("dora", "fsdp"),
    ("recommender", "offload"),
    ("llava", "tp2"),
    ("falcon-new", "tp2"),
    ("frozen-parts", "pp2"),
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about tiny configurations


def is_equal(family: str, strategy: str) -> None:
    outcome = run_on_rank(family, strategy, in_one_process(FAMILIES[family], parts_of(strategy)))
    assert outcome.kind == EQUAL, outcome.text


@pytest.mark.complete
@pytest.mark.parametrize(("family", "strategy"), FEW)
@pytest.mark.ranks(2)
def test_training_and_evaluation_equal_one_process(family, strategy):
    is_equal(family, strategy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if ranks_of(name) == 2])
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.ranks(2)
def test_every_cell_ends_as_the_page_says(family, strategy):
    expected = in_one_process(FAMILIES[family], parts_of(strategy))
    outcome = run_on_rank(family, strategy, expected)
    assert outcome.kind == read_results(PAGE, STRATEGIES)[family, strategy], outcome.text


def test_the_page_shows_every_cell():
    shown = read_results(PAGE, STRATEGIES)
    assert shown.keys() == {(family, strategy) for family in FAMILIES for strategy in STRATEGIES}


def test_there_are_many_families():
    assert len(FAMILIES) >= 60
