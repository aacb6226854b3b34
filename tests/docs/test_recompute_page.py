"""The Python blocks of the page on recompute run, in order, as one program."""

import re
from pathlib import Path

from forked_programs import run_python

PAGE = Path(__file__).parents[2] / "docs/recompute.md"


def test_blocks_of_the_recompute_page(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "program.py").write_text("".join(blocks) + "accelerator.end_training()\n")
    done = run_python("program.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
