"""Times the arithmetic of methods for slow links per number, compiled and by operations of torch.

::

    python benchmarks/encodings.py

Encoding with its kept error, adding a message and decoding a sum, for one matrix on one core. The
figures are processor time: the least of several rounds, since other work only adds to it.
"""

import argparse
import time
from typing import Any

import torch

from drivetrain.links.compressor import Compressor
from drivetrain.registry import compressors

METHODS = ("int8", "int4", "onebit", "topk", "powersgd")


def nanoseconds(method: Compressor[Any], matrix: torch.Tensor, rounds: int) -> float:
    """Return the processor time of a number, in ns."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        method.rehearse(matrix)
        spent.append(time.process_time() - start)
    return min(spent) / matrix.numel() * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048, help="rows and columns of the matrix")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrix = torch.randn(arguments.width, arguments.width)
    print("| method | compiled, ns | operations of torch, ns |\n|---|---|---|")
    for name in METHODS:
        kind = compressors().load(name)
        options: list[dict[str, bool]] = [{"compiled": True}, {"compiled": False}]
        if name == "powersgd":  # products of matrices, by torch alone
            options = [{}]
        found = [
            f"{nanoseconds(kind(kind.Config(**each)), matrix, arguments.rounds):.1f}"
            for each in options
        ]
        print(f"| `{name}` | {' | '.join(['-', *found][-2:])} |")


if __name__ == "__main__":
    main()
