"""Times steps over two emulated hosts, with and without a limit of the link between them.

::

    python benchmarks/slow_links.py                               # the best row of each strategy
    python benchmarks/slow_links.py --model large --rows ddp/powersgd --blocks 2
    python benchmarks/slow_links.py --rows local/int4 --rate 10mbit --blocks 1
    python benchmarks/slow_links.py --rows torch_fsdp2 deepspeed_z3 zero3/powersgd/int8 --steps 2 \\
        --blocks 1 --against zero3/powersgd/int8 --peer-python PEERS/bin/python
    python benchmarks/slow_links.py --rate none --per-host 2 --rows ddp/exact zero3/exact
    python benchmarks/slow_links.py --rate none --model large --rows ddp/exact ddp/powersgd
    python benchmarks/slow_links.py --table                       # of all runs, without a new one

Needs root: a host is a network namespace, and ``tc tbf`` limits the rate at which a host sends.
What a row may be, ``slow_links_rank.py`` says. Each run of a row goes through pairs of blocks of
steps, one without a limit, one with it; the ranks stop while the limit changes. ``--rate none``
leaves the second block of each pair out.

Each run adds a line to the file of ``--results``, and the table has the medians over all lines of
the same model, rate and number of ranks. So a long measurement can be made of many short calls.
Columns: a step without and with the limit, in milliseconds; the median of the ratios of pairs; the
ratio of steps with the limit to those of ``--against`` in the same call; megabytes per step that
the kernel has counted on the link of a host; their ratio to (H-1)/H times the parameters for each
reduce-scatter and each all-gather of an exact step, which is below 1 where units stay from forward
to backward and are gathered once; their ratio to what the ledger has counted on all ranks of the
host, where each operation has the least bytes that are possible; processor seconds of a rank per
step without a limit, of which the row ``STRATEGY/exact`` has how many; and the processor seconds of
the methods alone, for all matrices of the model, as a part of the step of that row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_step import Gpt
from side_by_side import MODELS
from slow_links_rank import train

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

PORT = 29531
NONE = "none"
ROWS = ["ddp/powersgd", "zero2/powersgd/topk", "zero3/powersgd/int8", "hybrid/powersgd"]
HOSTS = 2
SETTING = ("model", "rate", "per_host", "batch")
"""Options with which lines of results belong together."""

EXACT_OF = {"momentum": "ddp", "hybrid+momentum": "hybrid"}
"""Strategies of exact rows, where that is not a row's own."""

PASSES = {"zero3": 3, "fsdp": 3}
"""Reduce-scatters and all-gathers of a step; two for all strategies that are not named here."""


# --- runs ---


def start(hosts: "Hosts", row: str, folder: Path, arguments: argparse.Namespace) -> list:
    """Start one row on both hosts, with ``--per-host`` ranks each."""
    python = arguments.peer_python if row.startswith("deepspeed") else sys.executable
    program = [python, __file__, "--worker", "--model", arguments.model, "--rows", row]
    program += ["--steps", str(arguments.steps), "--blocks", str(count_blocks(arguments))]
    program += ["--folder", str(folder), "--batch", str(arguments.batch)]
    per_host, size = arguments.per_host, HOSTS * arguments.per_host
    processes = []
    for rank in range(size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GROUP_RANK": str(rank // per_host),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        host = hosts[rank // per_host]
        processes.append(host.start(program, folder=ROOT / "benchmarks", env=env))
    return processes


def count_blocks(arguments: argparse.Namespace) -> int:
    """Return the blocks of a run: each pair has one without a limit, and perhaps one with it."""
    return arguments.blocks * (1 if arguments.rate == NONE else 2)


def run(hosts: "Hosts", row: str, arguments: argparse.Namespace) -> list[dict]:
    """Run one row, change the limit when its ranks wait for that; return the words of all ranks."""
    unlimited(hosts)
    with tempfile.TemporaryDirectory() as name:
        folder, until = Path(name), time.monotonic() + arguments.timeout
        processes = start(hosts, row, folder, arguments)
        for block in range(count_blocks(arguments)):
            while not (folder / f"ask{block}").exists():
                if any(one.poll() for one in processes) or time.monotonic() > until:
                    raise SystemExit(f"{row} failed:\n{ended(processes)}")
                time.sleep(0.01)
            unlimited(hosts)
            if block % 2 and arguments.rate != NONE:
                for host in hosts:
                    host.limit(arguments.rate)
            (folder / f"go{block}").touch()
        try:
            left = max(1.0, until - time.monotonic())
            texts = [one.communicate(timeout=left)[0] for one in processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{row} did not end:\n{ended(processes)}") from None
        if any(one.returncode for one in processes):
            raise SystemExit(f"{row} failed:\n" + "\n".join(texts))
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]


def ended(processes: list) -> str:
    """End all ranks, and return what they printed."""
    for one in processes:
        one.kill()
    return "\n".join(one.communicate()[0] for one in processes)


def unlimited(hosts: "Hosts") -> None:
    """Take the limits off."""
    for host in hosts:
        command = ["tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(command, check=False, capture_output=True)


def measure(arguments: argparse.Namespace) -> None:
    """Run all rows once, and add a line for each to the file of results."""
    call = time.time()
    rate = "1gbit" if arguments.rate == NONE else arguments.rate  # taken off before each run
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name), rate=rate) as hosts:
        for row in arguments.rows:
            if row.startswith("deepspeed") and arguments.peer_python is None:
                print(f"{row} is left out: --peer-python names no Python that has deepspeed")
                continue
            line = {"call": call, "row": row, "ranks": run(hosts, row, arguments)}
            line |= {key: getattr(arguments, key) for key in SETTING}
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


# --- the table ---


def step_ms(row: str, block: dict) -> float:
    """Return a step of a block: the median, or the mean of a round, whose steps are not alike."""
    times = block["ms"]
    return statistics.mean(times) if row.startswith("local") else statistics.median(times[1:])


def pairs(line: dict) -> Iterator[tuple[float, float | None]]:
    """Yield the steps of each pair of blocks: without the limit, and with it if it had one."""
    blocks = [step_ms(line["row"], block) for block in line["ranks"][0]["blocks"]]
    if line["rate"] == NONE:
        yield from ((free, None) for free in blocks)
    else:
        yield from zip(blocks[::2], blocks[1::2], strict=True)


def limited(line: dict) -> float:
    """Return the median step of a run with the limit."""
    return statistics.median(slow for _, slow in pairs(line) if slow is not None)


def processor_s(lines: list[dict]) -> float:
    """Return the median processor time of a rank for a step, over blocks without a limit."""
    every = [rank["blocks"][:: 1 if line["rate"] == NONE else 2] for line in lines
             for rank in line["ranks"]]  # fmt: skip
    return statistics.median(b["processor_s"] / len(b["ms"]) for each in every for b in each)


def sent(line: dict) -> float:
    """Return the bytes per step on the link of the host that sends more, over all blocks."""
    blocks = [rank["blocks"] for rank in line["ranks"]]
    steps = sum(len(block["ms"]) for block in blocks[0])
    return max(sum(block["link"] for block in each) for each in blocks) / steps


def counted(line: dict) -> float | None:
    """Return the bytes per step by the ledgers of a host's ranks; None of a line without them."""
    blocks = [rank["blocks"] for rank in line["ranks"]]
    if not all(block.get("ledger") for each in blocks for block in each):
        return None
    steps = sum(len(block["ms"]) for block in blocks[0])
    return sum(block["ledger"] for each in blocks for block in each) / steps / HOSTS


def least(line: dict) -> float:
    """Return the bytes that a host must send in an exact step."""
    bytes_of_all = 4 * sum(p.numel() for p in Gpt(MODELS[line["model"]]).parameters())
    return PASSES.get(line["row"].split("/")[0], 2) * (HOSTS - 1) / HOSTS * bytes_of_all


def exact_of(row: str) -> str:
    """Return the row with the same work and without a method."""
    name = row.split("/", maxsplit=1)[0]
    return f"{EXACT_OF.get(name, name)}/exact"


def cells(row: str, lines: list[dict], known: dict[str, list[dict]], against: str | None) -> list:
    """Return the cells of one row."""
    both = [pair for line in lines for pair in pairs(line)]
    slow = [pair for pair in both if pair[1] is not None]
    beside = [limited(line) / limited(other) for line in lines for other in known.get(against, [])
              if slow and other["call"] == line["call"] and row != against]  # fmt: skip
    crossed = statistics.median(sent(line) for line in lines)
    extra = [sent(line) / ledger for line in lines if (ledger := counted(line))]
    busy, base = processor_s(lines), known.get(exact_of(row))
    encoding = [rank["encoding_s"] for line in lines for rank in line["ranks"]]
    more = f"{busy / processor_s(base):.2f}" if base else "-"
    part = (
        f"{statistics.median(encoding) / processor_s(base):.1%}" if base and any(encoding) else "-"
    )
    return [
        row,
        f"{statistics.median(free for free, _ in both):,.0f}",
        f"{statistics.median(limit for _, limit in slow):,.0f}" if slow else "-",
        f"{statistics.median(limit / free for free, limit in slow):.3f}" if slow else "-",
        *([f"{statistics.median(beside):.1f}" if beside else "-"] if against else []),
        f"{crossed / 1e6:.2f}",
        f"{crossed / least(lines[0]):.4f}",
        f"{statistics.median(extra):.4f}" if extra else "-",
        f"{busy:.2f}",
        more,
        part,
        f"{len(both)}",
    ]  # fmt: skip


def table(arguments: argparse.Namespace) -> None:
    """Print a table of all lines in the file of results that fit the options."""
    text = arguments.results.read_text(encoding="utf-8") if arguments.results.exists() else ""
    known: dict[str, list[dict]] = {}
    for line in map(json.loads, text.splitlines()):
        if all(line.get(key, 0) == getattr(arguments, key) for key in SETTING):
            known.setdefault(line["row"], []).append(line)
    heads = ["row", "no limit, ms", f"{arguments.rate}, ms", "ratio"]
    heads += [f"x {arguments.against}"] if arguments.against else []
    heads += ["MB sent", "x passes", "x ledger", "processor, s", "x exact", "encoding", "pairs"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row, lines in known.items():
        if arguments.table or row in arguments.rows:
            print(f"| {' | '.join(cells(row, lines, known, arguments.against))} |")


def main() -> None:
    """Measure rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it, or none")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--batch", type=int, default=0, help="samples of a rank; 0: the model's")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--per-host", type=int, default=1, help="ranks of a host")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block that count")
    parser.add_argument("--blocks", type=int, default=3, help="pairs of blocks")
    parser.add_argument("--against", help="a row that all others are compared with")
    parser.add_argument("--peer-python", help="a Python that has drivetrain and deepspeed")
    parser.add_argument("--results", type=Path, default=Path("slow_links.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print the table of all rows")
    parser.add_argument("--timeout", type=float, default=290.0, help="seconds of one row")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        (row,) = arguments.rows
        blocks, folder = arguments.blocks, arguments.folder
        train(row, arguments.model, arguments.batch, arguments.steps, blocks, folder)
        return
    if not arguments.table:
        measure(arguments)
    table(arguments)


if __name__ == "__main__":
    from emulated_hosts import Hosts

    main()
