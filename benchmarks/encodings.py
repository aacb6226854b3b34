"""Times the arithmetic of methods for slow links per number, compiled and by operations of torch.

::

    python benchmarks/encodings.py

Encoding with its kept error, adding a message and decoding a sum, for one matrix on one core. The
figures are processor time: the least of several rounds, since other work only adds to it.
"""

import argparse
import time

import torch

from drivetrain.links.codec import Codec
from drivetrain.registry import compressors

METHODS = ("int8", "int4", "onebit", "topk")


def nanoseconds(method: Codec, matrix: torch.Tensor, rounds: int) -> float:
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
        found = [
            nanoseconds(kind(kind.Config(compiled=compiled)), matrix, arguments.rounds)
            for compiled in (True, False)
        ]
        print(f"| `{name}` | {found[0]:.1f} | {found[1]:.1f} |")


if __name__ == "__main__":
    main()
