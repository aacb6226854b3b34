"""Runs one of the programs in a file, named by its first word."""

import argparse
import sys
from collections.abc import Callable, Mapping


def run_program(programs: Mapping[str, Callable[[], None]]) -> None:
    """Run the program that the first argument names; it reads the others from ``sys.argv``."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n\n".join(f"{name}: {run.__doc__}" for name, run in programs.items()),
    )
    parser.add_argument("program", choices=programs)
    chosen = parser.parse_args(sys.argv[1:2]).program
    sys.argv = [f"{sys.argv[0]} {chosen}", *sys.argv[2:]]
    programs[chosen]()
