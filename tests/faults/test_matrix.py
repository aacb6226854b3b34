"""The map of faults: every fault has a row, and no row points to nothing."""

import ast
import tomllib
from functools import cache
from pathlib import Path

from fault_times import written_times

ROOT = Path(__file__).parents[2]
MATRIX = tomllib.loads((ROOT / "tests/faults/matrix.toml").read_text(encoding="utf-8"))


@cache
def functions(path: str) -> frozenset[str]:
    """Return the names of the functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_fault_has_a_row():
    assert list(MATRIX) == [f"F{number}" for number in range(1, 36)]


def test_a_row_points_to_tests_that_exist():
    for name in MATRIX:
        row = MATRIX[name]
        assert row.keys() - {"missing"} == {"fault", "follows", "tests"}, name
        assert row["tests"], name
        for test in row["tests"]:
            path, _, function = test.partition("::")
            assert function in functions(path), test


def test_each_test_of_a_file_of_this_folder_is_in_the_map_or_none():
    mapped = {test for row in MATRIX.values() for test in row["tests"]}
    files = {test.partition("::")[0] for test in mapped if test.startswith("tests/faults/test_")}
    here = {
        f"{path}::{function}"
        for path in files
        for function in functions(path)
        if function.startswith("test_")
    }
    assert len(files) > 5
    assert here - mapped == set()


def test_measured_seconds_are_written_in_the_order_of_the_rows():
    times = tomllib.loads(written_times({"F22": {"all ended": 7.5}, "F1": {"all ended": 2.0}}))
    assert list(times.items()) == [("F1", {"all ended": 2.0}), ("F22", {"all ended": 7.5})]
