"""Documents that explode, or that the parser chokes on, are refused in one line."""

import pytest

from drivetrain.config import read_file
from drivetrain.errors import ConfigError

BOMB = "\n".join(
    ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}" for i in range(1, 26))]
)


def test_documents_without_end_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    for text, said in (
        (BOMB, "expected at most 20000 keys and values"),
        ("a: &a [*a]", "40 levels"),
        ("a: &a {b: *a}", "40 levels"),
        ("a: " + "[" * 3000 + "]" * 3000, "40 levels"),
        ("seed: " + "9" * 900_000, "a number too long"),
        ("seed: 1\0", "special characters are not allowed"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_file(path)
        assert said in str(caught.value)
        assert len(str(caught.value)) < 500
