"""Every paper that drivetrain implements is found in a file of the plugin that bears its name."""

import ast
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Paper(NamedTuple):
    """Where a paper is implemented: the strategy's entry point, the file, and how it is cited."""

    strategy: str
    path: str
    cited: str
    """Words of the file's docstrings, and ``...`` between those that other words separate."""
    torch: bool = True  # False where the file only says what a core or a schedule does


SCHEDULES = "drivetrain_megatron/pipeline/schedules.py"
PAPERS = (
    Paper("local", "drivetrain_local/outer.py", "Douillard et al. 2023"),
    Paper("local", "drivetrain_local/outer.py", "Douillard et al. 2025"),
    Paper("ddp", "drivetrain_ddp/strategy.py", "Li et al. ... 2020"),
    Paper("ddp", "drivetrain_ddp/strategy.py", "Vogels ... 2019"),
    Paper("zero3", "drivetrain_zero/zero.py", "Rajbhandari et al. ... 2020", torch=False),
    Paper("fsdp", "drivetrain_fsdp/fsdp.py", "Zhao et al. ... 2023"),
    Paper("offload", "drivetrain_offload/strategy.py", "Ren et al. ... 2021"),
    Paper("offload", "drivetrain_offload/strategy.py", "Rajbhandari et al. ... ZeRO-Infinity"),
    Paper("megatron", "drivetrain_megatron/tensor/operators.py", "Shoeybi et al. ... 2019"),
    Paper("megatron", "drivetrain_megatron/tensor/vocabulary.py", "Shoeybi et al. ... 2019"),
    Paper("megatron", "drivetrain_megatron/tensor/operators.py", "Korthikanti et al. ... 2022"),
    Paper("megatron", SCHEDULES, "Huang et al. ... 2019", torch=False),
    Paper("megatron", SCHEDULES, "Narayanan et al. ... 2006.09503", torch=False),
    Paper("megatron", SCHEDULES, "Narayanan et al. ... 2104.04473", torch=False),
    Paper("megatron", SCHEDULES, "Qi et al. ... 2023", torch=False),
    Paper("megatron", "drivetrain_megatron/tensor/linear.py", "Qi et al. ... 2023"),
)


def plugin_of(strategy: str) -> str:
    """Return the package of a strategy's entry point."""
    (entry,) = entry_points(group="drivetrain.strategies", name=strategy)
    return entry.module.partition(".")[0]


def fault_of(paper: Paper) -> str:
    """Return what is wrong with the place of a paper, or nothing."""
    path = ROOT / "plugins" / paper.path
    if not path.exists():
        return f"{paper.path} does not exist"
    if paper.path.partition("/")[0] != plugin_of(paper.strategy):
        return f"{paper.path} is not in the plugin of {paper.strategy}"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = " ".join(docstrings_of(tree).split())
    missing = [words for words in paper.cited.split(" ... ") if words not in docstrings]
    if missing:
        return f"{paper.path} does not cite {missing}"
    if paper.torch and "torch" not in imported(tree):
        return f"{paper.path} computes nothing: it does not import torch"
    return ""


def docstrings_of(tree: ast.Module) -> str:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def imported(tree: ast.Module) -> set[str]:
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_paper_is_in_its_plugin():
    assert list(filter(None, map(fault_of, PAPERS))) == []
