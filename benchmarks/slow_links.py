"""Times steps over two emulated hosts, with and without a limit of the link between them.

::

    python benchmarks/slow_links.py                               # the best row of each strategy
    python benchmarks/slow_links.py --model large --blocks 2
    python benchmarks/slow_links.py --rows ddp/exact ddp/int8 zero2/powersgd/int4 --rate 1gbit

Needs root: a host is a network namespace, and ``tc tbf`` limits the rate at which a host sends. A
row is ``STRATEGY/GRADIENTS``, or with a method for parameters ``STRATEGY/GRADIENTS/PARAMETERS``;
``hybrid`` is fsdp with ``sharding: hybrid``.

Each row is one run. It goes through pairs of blocks: some steps without a limit, some with it; the
ranks stop while the limit changes, and the first step of a block does not count. Per row: the
median step of all blocks of a kind, in milliseconds, the median of the ratios of the pairs, and the
bytes that rank 0 sends per step, to the other host alone where a method is used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from ddp_step import Gpt, loss_of
from side_by_side import MODELS

from drivetrain import Accelerator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))

WARM_UP = 3
PORT = 29531
ROWS = ["ddp/powersgd", "zero2/powersgd/powersgd", "zero3/powersgd/int8", "hybrid/powersgd"]


def config_of(row: str) -> dict[str, object]:
    """Return the configuration that a row names."""
    name, gradients, *rest = row.split("/")
    hybrid = {"name": "fsdp", "sharding": "hybrid"}
    far = {"gradients": gradients, "parameters": rest[0] if rest else "exact"}
    return {"strategy": hybrid if name == "hybrid" else {"name": name}, "links": {"far": far}}


def await_limit(folder: Path, block: int, accelerator: Accelerator) -> None:
    """Stop until the other process has changed the limit for the next block."""
    if accelerator.is_main_process:
        (folder / f"ask{block}").touch()
    while not (folder / f"go{block}").exists():
        time.sleep(0.01)
    accelerator.wait_for_everyone()


def train(arguments: argparse.Namespace) -> None:
    """Train on this rank, and let rank 0 print the median step of each block."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size, (row,) = MODELS[arguments.model], arguments.rows
    accelerator = Accelerator(config=config_of(row), cpu=True)
    model = Gpt(size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    generator = torch.Generator().manual_seed(accelerator.process_index)

    def step() -> float:
        tokens = torch.randint(size.vocab, (size.batch, size.seq + 1), generator=generator)
        start = time.perf_counter()
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, tokens))
        optimizer.step()
        return 1000 * (time.perf_counter() - start)

    for _ in range(WARM_UP):
        step()
    medians, before = [], accelerator.traffic.sent()
    for block in range(2 * arguments.blocks):
        await_limit(arguments.folder, block, accelerator)
        medians.append(statistics.median([step() for _ in range(1 + arguments.steps)][1:]))
    exact = all(method == "exact" for method in row.split("/")[1:])
    sent = sum(
        count - before.get(key, 0)
        for key, count in accelerator.traffic.sent().items()
        if key[0].endswith((".far", ".across")) or exact
    )
    if accelerator.is_main_process:
        steps = 2 * arguments.blocks * (1 + arguments.steps)
        print(json.dumps({"ms": medians, "mb": sent / steps / 1e6}), flush=True)
    accelerator.free_memory()


def start(hosts: "Hosts", row: str, folder: Path, arguments: argparse.Namespace) -> list:
    """Start one row on both hosts, with ``--per-host`` ranks each."""
    program = [sys.executable, __file__, "--worker", "--model", arguments.model, "--rows", row]
    program += ["--steps", str(arguments.steps), "--blocks", str(arguments.blocks)]
    program += ["--folder", str(folder)]
    per_host, size = arguments.per_host, 2 * arguments.per_host
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


def run(hosts: "Hosts", row: str, arguments: argparse.Namespace) -> dict:
    """Run one row, and change the limit whenever its ranks wait for that."""
    unlimited(hosts)
    with tempfile.TemporaryDirectory() as name:
        folder, until = Path(name), time.monotonic() + arguments.timeout
        processes = start(hosts, row, folder, arguments)
        for block in range(2 * arguments.blocks):
            while not (folder / f"ask{block}").exists():
                if any(one.poll() for one in processes) or time.monotonic() > until:
                    raise SystemExit(f"{row} failed:\n{ended(processes)}")
                time.sleep(0.01)
            if block % 2:
                for host in hosts:
                    host.limit(arguments.rate)
            else:
                unlimited(hosts)
            (folder / f"go{block}").touch()
        texts = [one.communicate(timeout=arguments.timeout)[0] for one in processes]
        if any(one.returncode for one in processes):
            raise SystemExit(f"{row} failed:\n" + "\n".join(texts))
    return json.loads(texts[0].strip().splitlines()[-1])


def ended(processes: list) -> str:
    """End all ranks, and return what they printed."""
    for one in processes:
        one.terminate()
    return "\n".join(one.communicate()[0] for one in processes)


def unlimited(hosts: "Hosts") -> None:
    """Take the limits off."""
    for host in hosts:
        command = ["tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(command, check=False, capture_output=True)


def main() -> None:
    """Time all rows, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--per-host", type=int, default=1, help="ranks of a host")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block that count")
    parser.add_argument("--blocks", type=int, default=3, help="pairs of blocks")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one row")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments)
        return
    print(f"| row | no limit, ms | {arguments.rate}, ms | ratio | MB sent |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, Hosts(Path(name), rate=arguments.rate) as hosts:
        for row in arguments.rows:
            found = run(hosts, row, arguments)
            free, slow = found["ms"][::2], found["ms"][1::2]
            ratio = statistics.median(b / a for a, b in zip(free, slow, strict=True))
            medians = f"{statistics.median(free):,.0f} | {statistics.median(slow):,.0f}"
            print(f"| {row} | {medians} | {ratio:.2f} | {found['mb']:.1f} |", flush=True)


if __name__ == "__main__":
    from emulated_hosts import Hosts

    main()
