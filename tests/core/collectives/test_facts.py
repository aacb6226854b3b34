"""Facts of ranks travel as JSON of one type, and what another rank sends is never run."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

import drivetrain
from drivetrain import CollectiveError
from drivetrain.collectives.facts import gather_facts, share_facts

OBJECTS = {
    "communication.py": "functions of the public API that take a script's objects",
    "data/streams.py": "a batch of the script's dataset may hold any object",
    "data/examples.py": "a batch of the script's dataset may hold any object",
    "facade/uneven.py": "metrics take a script's objects, uneven inputs its groups and schedules",
    "integrations/fabric.py": "a function of Fabric's API that takes a script's objects",
    "testing/conformance/suite.py": "states of the reference, which tests compare",
}
"""Files that may send pickles between the ranks of a run, and why."""


@dataclass(frozen=True)
class Facts:
    name: str
    sizes: list[int]


@pytest.mark.ranks(3)
def test_facts_of_all_ranks_or_of_one():
    rank = dist.get_rank()
    mine = Facts(f"größe {rank}", list(range(rank)))
    told = gather_facts(mine, Facts, doing="a test")
    assert told == [Facts(f"größe {each}", list(range(each))) for each in range(3)]
    assert gather_facts("", str, doing="a test") == ["", "", ""]
    lists = gather_facts({"ranks": [rank]}, dict[str, list[int]], doing="a test")
    assert lists == [{"ranks": [0]}, {"ranks": [1]}, {"ranks": [2]}]
    assert share_facts(mine, Facts, doing="a test") == Facts("größe 0", [])
    assert share_facts("", str, doing="a test") == ""
    assert gather_facts(mine, Facts, doing="a test", main_only=True) == (told if rank == 0 else [])
    assert gather_facts("", str, doing="a test", main_only=True) == ([""] * 3 if rank == 0 else [])


@pytest.mark.ranks(2)
def test_facts_of_another_type_are_refused_on_every_rank():
    facts = Facts("whole", [1]) if dist.get_rank() else {"name": "half"}
    with pytest.raises(CollectiveError, match="a test: expected facts of rank 0"):
        gather_facts(facts, Facts, doing="a test")
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError, match="a test: expected facts of rank 0"):
            gather_facts(facts, Facts, doing="a test", main_only=True)
    else:
        assert gather_facts(facts, Facts, doing="a test", main_only=True) == []
    with pytest.raises(CollectiveError, match="the same version on every host"):
        share_facts(facts, Facts, doing="a test")


def test_one_rank_alone_needs_no_exchange():
    assert gather_facts(Facts("one", []), Facts, doing="a test") == [Facts("one", [])]
    assert share_facts(3, int, doing="a test") == 3


def test_no_other_module_sends_pickles():
    folder = Path(drivetrain.__file__).parent
    found = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in {"all_gather_object", "gather_object", "broadcast_object_list"}
        and isinstance(node.value, ast.Name)
        and node.value.id in {"dist", "communication"}
    }
    assert found == set(OBJECTS)
