"""Times the file of the store nvme against fio on the same file system, in turns.

::

    python tests/benchmarks/offload_disk.py /mnt/nvme --mib 1024 --request-mib 4 --threads 8

Both overwrite and read one preallocated file sequentially, past the page cache, with the same
request size and as many requests in flight; fio through libaio. Rates are medians over the turns,
the ratio is the median of the turns' ratios: a disk's speed drifts.
Without fio on the PATH (Debian: apt-get install fio) only ours are printed.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from drivetrain_offload.buffers import aligned_empty
from drivetrain_offload.files import DiskFile

MIB = 2**20
BUFFER = 32 * MIB


class Ours:
    """The file of the store."""

    def __init__(self, directory: Path, nbytes: int, request_mib: float, threads: int) -> None:
        self._file = DiskFile(directory, request_bytes=int(request_mib * MIB), threads=threads)
        self._file.grow(nbytes)
        self.direct = self._file.direct
        self._buffer = aligned_empty(min(nbytes, BUFFER), torch.uint8)
        self._buffer.random_(256)
        self._nbytes = nbytes
        self.run("write")

    def run(self, what: str) -> float:
        """Move every byte once; return bytes per second."""
        submit = self._file.read if what == "read" else self._file.write
        self._file.forget()
        began = time.perf_counter()
        transfers = [
            submit(at, self._buffer[: min(len(self._buffer), self._nbytes - at)])
            for at in range(0, self._nbytes, len(self._buffer))
        ]
        for transfer in transfers:
            transfer.wait()
        self._file.flush()
        return self._nbytes / (time.perf_counter() - began)

    def close(self) -> None:
        self._file.close()


class Fio:
    """The reference: libaio on a file of its own, laid out before the first turn."""

    def __init__(self, directory: Path, nbytes: int, request_mib: float, threads: int) -> None:
        self._command = [
            "fio", "--name=disk", f"--filename={directory / 'fio'}", f"--size={nbytes}",
            f"--bs={int(request_mib * MIB)}", f"--iodepth={threads}", "--ioengine=libaio",
            "--direct=1", "--fallocate=posix", "--overwrite=1", "--output-format=json",
        ]  # fmt: skip
        self.run("write")

    def run(self, what: str) -> float:
        """Move every byte once; return the bytes per second that fio reports."""
        done = subprocess.run(
            [*self._command, f"--rw={what}"], check=True, capture_output=True, text=True
        )
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][what]["bw_bytes"])


def compare(
    rivals: dict[str, Callable[[str], float]], turns: int
) -> dict[tuple[str, str], list[float]]:
    """Return the rates of every rival and direction, in turns; who goes first alternates."""
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns):
        for what in ("write", "read"):
            for name in sorted(rivals, reverse=bool(turn % 2)):
                rates.setdefault((name, what), []).append(rivals[name](what))
    return rates


def ratio(rates: dict[tuple[str, str], list[float]], what: str) -> str:
    pairs = zip(rates["ours", what], rates["fio", what], strict=True)
    return f", ratio {statistics.median(ours / fio for ours, fio in pairs):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--request-mib", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mib * MIB
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        directory = Path(name)
        ours = Ours(directory, nbytes, options.request_mib, options.threads)
        rivals: dict[str, Callable[[str], float]] = {"ours": ours.run}
        if not ours.direct:
            print("this file system refuses O_DIRECT: fio needs it, so there is no comparison")
        elif shutil.which("fio") is None:
            print("fio is not on the PATH: no comparison (Debian: apt-get install fio)")
        else:
            rivals["fio"] = Fio(directory, nbytes, options.request_mib, options.threads).run
        rates = compare(rivals, options.turns)
        ours.close()
    for what in ("write", "read"):
        middle = {name: statistics.median(rates[name, what]) for name in rivals}
        text = ", ".join(
            f"{name} {value / 1e9:.2f} GB/s "
            f"({min(rates[name, what]) / 1e9:.2f} to {max(rates[name, what]) / 1e9:.2f})"
            for name, value in middle.items()
        )
        print(f"{what:5}  {text}{ratio(rates, what) if 'fio' in rivals else ''}")


if __name__ == "__main__":
    main()
