"""The Python blocks of the page on recompute run, in order, as one program."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/recompute.md"


def test_blocks_of_the_recompute_page(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "program.py").write_text("".join(blocks) + "accelerator.end_training()\n")
    subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        check=True,
    )
