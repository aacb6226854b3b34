"""Counts the files and functions that `drivetrain launch` runs until it starts the first rank.

::

    python benchmarks/house_launch.py

Prints one line of JSON. A file counts that is only imported, too.
"""

import json
import os
import subprocess
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

from source_tree import Function, counts_of, function_of


def main() -> None:
    met: set[Function] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            met.add(function_of(frame.f_code))

    def first_rank(*_: Any, **__: Any) -> NoReturn:
        sys.setprofile(None)
        print(json.dumps(counts_of(met)), flush=True)
        os._exit(0)

    subprocess.Popen.__init__ = first_rank  # type: ignore[method-assign]
    sys.argv = ["drivetrain", "launch", "--nproc-per-node", "2", __file__]
    threading.setprofile(note)
    sys.setprofile(note)
    from drivetrain_launch.cli import main as drivetrain

    drivetrain()


if __name__ == "__main__":
    main()
