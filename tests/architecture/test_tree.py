"""The shape of the tree: no circle of imports, no class name twice, no crowded folder."""

from collections import Counter
from pathlib import Path

import pytest
from source_tree import SourceTree

ROOT = Path(__file__).parents[2]
FOLDER_MODULES = 20


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(ROOT)


def test_files_import_each_other_in_no_circle(tree):
    assert tree.file_circles() == []


def test_folders_import_each_other_in_no_circle(tree):
    assert tree.folder_circles() == []


def test_no_class_name_is_defined_twice(tree):
    assert tree.homonyms("class") == {}


def test_no_folder_is_crowded(tree):
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in tree.modules.values()
        if path.stem not in {"__init__", "__main__"}
    )
    assert {folder: n for folder, n in counts.items() if n > FOLDER_MODULES} == {}


# --- that what is looked for is found ---


def write_tree(root: Path, files: dict[str, str]) -> SourceTree:
    for name, text in files.items():
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return SourceTree(root)


def test_a_circle_under_type_checking_is_found(tmp_path):
    tree = write_tree(
        tmp_path,
        {
            "core/__init__.py": "",
            "core/a.py": "from core.b import b",
            "core/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import core.c",
            "core/c.py": "def late():\n    from core import a",
            "core/d.py": "import core.a",
        },
    )
    assert tree.file_circles() == [["core.a", "core.b", "core.c"]]
    assert tree.folder_circles() == []


def test_a_circle_of_folders_without_one_of_files_is_found(tmp_path):
    tree = write_tree(
        tmp_path,
        {
            "core/__init__.py": "",
            "core/left/__init__.py": "",
            "core/left/high.py": "from core.right import low",
            "core/left/low.py": "",
            "core/right/__init__.py": "",
            "core/right/high.py": "from core.left.low import name",
            "core/right/low.py": "",
        },
    )
    assert tree.file_circles() == []
    assert tree.folder_circles() == [["core.left", "core.right"]]


def test_a_class_defined_twice_is_found(tmp_path):
    tree = write_tree(
        tmp_path, {"a.py": "class Same: ...\nclass A: ...", "b.py": "class Same: ...\ndef A(): ..."}
    )
    assert tree.homonyms("class") == {"Same": ["a", "b"]}
