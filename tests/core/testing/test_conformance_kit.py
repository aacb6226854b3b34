"""Each conformance check finds the mistake that it is there for; our own strategies pass."""

import shutil
from pathlib import Path

import pytest

from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import CASES

pytest_plugins = ["pytester"]

TOYS = Path(__file__).with_name("toys") / "toy_strategies.py"

INI = """
[pytest]
addopts = --strict-markers --import-mode=importlib -p no:cacheprovider -q
pythonpath = plugin
filterwarnings = error
"""

MISTAKES = {
    "ForgetsToDivide": ["test_backward_by_the_user"],
    "ForgetsUnused": ["test_loss_that_misses_the_model_on_one_rank"],
    "ForgetsToWait": ["test_accumulation_with_a_partial_window"],
    "ClipsLocally": ["test_clipping_by_the_global_norm"],
    "PromisesTooLittle": ["test_cost_equals_ledger", "test_cost_equals_memory"],
    "SendsInSecret": ["test_ledger_equals_kernel"],
    "SavesTwice": ["test_shards_hold_everything_once"],
    "LosesMoments": ["test_saved_run_goes_on_bit_by_bit"],
    "NeverLetsGo": ["test_taken_off"],
}


@pytest.fixture
def project(pytester):
    """A project with an installed stranger's distribution that provides the toy strategies."""
    pytester.makefile(".ini", pytest=INI)
    pytester.makeconftest("from drivetrain.testing import pool\n\npool.GRACE_S = 1.0\n")
    plugin = pytester.mkdir("plugin")
    shutil.copy(TOYS, plugin)
    info = plugin / "toy_strategies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-strategies\nVersion: 1.0\n")
    lines = [f"{name} = toy_strategies:{name}" for name in MISTAKES]
    (info / "entry_points.txt").write_text("[drivetrain.strategies]\n" + "\n".join(lines) + "\n")
    return pytester


def suite(name):
    return (
        f"class Test{name}(StrategyConformance):\n"
        f"    strategy = {name!r}\n    worlds = (2,)\n    timeout_s = 20.0\n"
    )


HEADER = "from drivetrain.testing.conformance import StrategyConformance\n"


def test_mistakes_that_one_process_can_make_are_found(project, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(project.path / "plugin")
    for name, check, arguments, said in (
        ("ClipsLocally", "test_clipping_by_the_global_norm", (), "Scalars are not close"),
        ("PromisesTooLittle", "test_cost_equals_memory", (), "promised 0 bytes of optimizer"),
        ("LosesMoments", "test_saved_run_goes_on_bit_by_bit", (tmp_path,), "differs after load"),
        ("NeverLetsGo", "test_taken_off", (), "are not close"),
    ):
        checks = type(f"Test{name}", (StrategyConformance,), {"strategy": name})()
        with pytest.raises(AssertionError, match=said):
            getattr(checks, check)(1, *arguments)
    twins = Twins(checks.make_accelerator(), CASES["mlp"])
    twins.check()
    next(twins.twin.parameters()).data.add_(1e-8)
    with pytest.raises(AssertionError, match="differs from one process on the same data"):
        twins.check()


@pytest.mark.exhaustive
def test_each_mistake_is_found(project):
    project.makepyfile(test_toys=HEADER + "".join(map(suite, MISTAKES)))
    chosen = [
        f"test_toys.py::Test{name}::{check}[ranks2]"
        for name, checks in MISTAKES.items()
        for check in checks
    ]
    result = project.runpytest_subprocess("-rA", *chosen, timeout=800)
    result.assert_outcomes(failed=len(chosen))
