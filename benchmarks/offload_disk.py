"""Times the file of the store nvme against fio on the same file system, in turns.

::

    python benchmarks/offload_disk.py /mnt/nvme --mib 1024 --request-mib 4 --threads 8

Both overwrite and read one preallocated file sequentially, past the page cache, with the same
request size and as many requests in flight; fio through libaio, three times over in every turn, so
that the first touch of its fresh buffers counts little. Rates are medians over the turns, a ratio
is the median of the turns' ratios: a disk's speed drifts. Our buffers lie in transparent huge
pages. fio's do where pages are set aside (sysctl vm.nr_hugepages=64): that row is the equal match.
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
from drivetrain_offload.stores.files import DiskFile

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

    def __init__(
        self, directory: Path, nbytes: int, request_mib: float, threads: int, *, huge: bool
    ) -> None:
        self._command = [
            "fio", "--name=disk", f"--filename={directory / 'fio'}", f"--size={nbytes}",
            f"--bs={int(request_mib * MIB)}", f"--iodepth={threads}", "--ioengine=libaio",
            "--direct=1", "--fallocate=posix", "--overwrite=1", "--loops=3",
            "--output-format=json",
        ]  # fmt: skip
        if huge:
            self._command += ["--mem=mmaphuge", "--hugepage-size=2m"]
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


def free_huge_bytes() -> int:
    facts = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    return int(facts.get("HugePages_Free", "0")) * 2 * MIB


def ratio(rates: dict[tuple[str, str], list[float]], what: str, rival: str) -> str:
    pairs = zip(rates["ours", what], rates[rival, what], strict=True)
    return f"{statistics.median(ours / theirs for ours, theirs in pairs):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            how = (directory, nbytes, options.request_mib, options.threads)
            rivals["fio"] = Fio(*how, huge=False).run
            needed = int(options.request_mib * MIB) * options.threads
            if free_huge_bytes() >= needed + 2 * MIB:
                rivals["fio in huge pages"] = Fio(*how, huge=True).run
            else:
                print(f"no {needed // MIB + 2} MiB of huge pages are set aside: see --help")
        rates = compare(rivals, options.turns)
        ours.close()
    for what in ("write", "read"):
        for name in rivals:
            found = [rate / 1e9 for rate in rates[name, what]]
            print(
                f"{what:5}  {name:17}  {statistics.median(found):5.2f} GB/s ({min(found):.2f} to "
                f"{max(found):.2f})  ours is {ratio(rates, what, name)} of it"
            )


if __name__ == "__main__":
    main()
