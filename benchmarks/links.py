"""Measures training over slow links: its time, its bytes, its quality and its encodings."""

import argparse
import json
import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from hashlib import sha256
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from programs import run_program
from safetensors.torch import load_file, save_file
from side_by_side import AT_END, MODELS, Gpt, Step, loss_of, with_accelerator
from side_by_side import ROWS as PEERS
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator
from drivetrain.compression.compressor import Compressor
from drivetrain.config.outline import EXACT
from drivetrain.registry import compressors

# --- rates ---


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "shared"))
from emulated_hosts import Hosts  # noqa: E402

PORT = 29531
NONE = "none"
RATES_ROWS = ["ddp/powersgd", "zero2/powersgd/topk", "zero3/powersgd/int8", "hybrid/powersgd"]
HOSTS = 2
SETTING = ("model", "rate", "per_host", "batch")
"""Options with which lines of results belong together."""

EXACT_OF = {"momentum": "ddp", "hybrid+momentum": "hybrid"}
"""Strategies of exact rows, where that is not a row's own."""

PASSES = {"zero3": 3, "fsdp": 3}
"""Reduce-scatters and all-gathers of a step; two for all strategies that are not named here."""


# --- runs ---


def start(hosts: Hosts, row: str, folder: Path, arguments: argparse.Namespace) -> list:
    """Start one row on both hosts, with ``--per-host`` ranks each."""
    python = arguments.peer_python if row.startswith("deepspeed") else sys.executable
    program = [python, __file__, "rates", "--worker", "--model", arguments.model, "--rows", row]
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


def rates_run(hosts: Hosts, row: str, arguments: argparse.Namespace) -> list[dict]:
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


def unlimited(hosts: Hosts) -> None:
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
            line = {"call": call, "row": row, "ranks": rates_run(hosts, row, arguments)}
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


def rates_processor_s(lines: list[dict]) -> float:
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
    busy, base = rates_processor_s(lines), known.get(exact_of(row))
    encoding = [rank["encoding_s"] for line in lines for rank in line["ranks"]]
    more = f"{busy / rates_processor_s(base):.2f}" if base else "-"
    part = (
        f"{statistics.median(encoding) / rates_processor_s(base):.1%}"
        if base and any(encoding)
        else "-"
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


def rates_table(arguments: argparse.Namespace) -> None:
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


def rates_main() -> None:
    """Times steps over two emulated hosts, with and without a limit of the link between them.

    ::

        python benchmarks/links.py rates  # the best row of each strategy
        python benchmarks/links.py rates --model large --rows ddp/powersgd --blocks 2
        python benchmarks/links.py rates --rows local/int4 --rate 10mbit --blocks 1
        python benchmarks/links.py rates --rows torch_fsdp2 deepspeed_z3 zero3/powersgd/int8 \\
            --steps 2 --blocks 1 --against zero3/powersgd/int8 --peer-python PEERS/bin/python
        python benchmarks/links.py rates --rate none --per-host 2 --rows ddp/exact zero3/exact
        python benchmarks/links.py rates --rate none --model large --rows ddp/exact ddp/powersgd
        python benchmarks/links.py rates --table  # of all runs, without a new one

    A row is one of:

    - ``STRATEGY/GRADIENTS``, or ``STRATEGY/GRADIENTS/PARAMETERS`` with a method for parameters;
      ``hybrid`` is fsdp with ``sharding: hybrid``, ``zero3+secondary`` and ``fsdp+secondary`` are
      zero3 and fsdp with ``secondary: host``, ``momentum`` and ``hybrid+momentum`` are ddp and
      hybrid with momenta in place of gradients (1-bit Adam with the method ``onebit``);
      ``powersgd:16`` has another rank than the default, and so has ``powersgd`` for parameters in
      the same row;
    - ``local/GRADIENTS``: Streaming DiLoCo with ``ddp`` inside of a host; a block is a whole round,
      and no exchange is under way at its edges;
    - a peer of ``side_by_side.py``, such as ``torch_fsdp2`` or ``deepspeed_z3``.

    Needs root: a host is a network namespace, and ``tc tbf`` limits the rate at which a host sends.
    What a row may be, the code of its ranks says. Each run of a row goes through pairs of blocks
    of steps, one without a limit, one with it; the ranks stop while the limit changes. ``--rate
    none`` leaves the second block of each pair out.

    Each run adds a line to the file of ``--results``, and the table has the medians over all lines
    of the same model, rate and number of ranks. So a long measurement can be made of many short
    calls. Columns: a step without and with the limit, in milliseconds; the median of the ratios of
    pairs; the ratio of steps with the limit to those of ``--against`` in the same call; megabytes
    per step that the kernel has counted on the link of a host; their ratio to (H-1)/H times the
    parameters for each reduce-scatter and each all-gather of an exact step, which is below 1 where
    units stay from forward to backward and are gathered once; their ratio to what the ledger has
    counted on all ranks of the host, where each operation has the least bytes that are possible;
    processor seconds of a rank per step without a limit, of which the row ``STRATEGY/exact`` has
    how many; and the processor seconds of the methods alone, for all matrices of the model, as a
    part of the step of that row.
    """
    parser = argparse.ArgumentParser(description=str(rates_main.__doc__).partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it, or none")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--batch", type=int, default=0, help="samples of a rank; 0: the model's")
    parser.add_argument("--rows", nargs="+", default=RATES_ROWS)
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
    rates_table(arguments)


# --- rank ---


RANK_WARM_UP = 3
SETTLE_S = 0.5
"""Time for what a step has left under way, such as gathers of parameters: its bytes count, too."""

BUCKET_MIB = 8
"""Of momenta: the last bucket is on the link when backward has ended, so it should be small."""

HYBRID = {"name": "fsdp", "sharding": "hybrid"}
RANK_ROUND, FRAGMENTS, DELAY = 36, 6, 5
RANK_STREAMING = {
    "name": "local",
    "every": RANK_ROUND,
    "fragments": FRAGMENTS,
    "delay": DELAY,
    "keep": 0.5,
}
BETWEEN = DELAY + (RANK_ROUND // FRAGMENTS - DELAY) // 2
"""A step of a round at which no exchange is under way."""


def is_peer(row: str) -> bool:
    """Return whether a row is not ours."""
    return "/" not in row


def is_local(row: str) -> bool:
    """Return whether a row takes local steps."""
    return row.startswith("local/")


def config_of(row: str) -> dict[str, object]:
    """Return the configuration that a row of ours names."""
    name, *methods = row.split("/")
    gradients, rank = rank_of(methods[0])
    parameters = methods[1] if len(methods) > 1 else EXACT
    strategy: dict[str, dict[str, object]] = {
        "hybrid": HYBRID,
        "hybrid+momentum": {**HYBRID, "exchange": "momentum"},
        "zero3+secondary": {"name": "zero3", "secondary": "host"},
        "fsdp+secondary": {"name": "fsdp", "secondary": "host"},
        "momentum": {"name": "ddp", "exchange": "momentum", "bucket_mib": BUCKET_MIB},
        "local": RANK_STREAMING,
    }
    far: dict[str, object] = {"gradients": gradients, "parameters": parameters, "options": rank}
    if name.endswith("momentum"):
        far["warmup_steps"] = RANK_WARM_UP - 1
    return {"strategy": strategy.get(name, {"name": name}), "links": {"far": far}}


def rank_of(method: str) -> tuple[str, dict[str, int]]:
    """Return the name of a method, and its option in a row."""
    name, _, rank = method.partition(":")
    return name, {"rank": int(rank)} if rank else {}


def made(row: str, model: nn.Module) -> tuple[Step, Callable[[], int]]:
    """Return the step of a row, and the bytes that its ledger has counted between hosts so far.

    There is a default process group afterwards. A peer has no ledger: the bytes are 0.
    """
    if is_peer(row):
        dist.init_process_group("gloo")
        return PEERS[row](model), lambda: 0
    accelerator = Accelerator(config=config_of(row), cpu=True)

    def counted() -> int:
        sent = accelerator.traffic.sent().items()
        return sum(nbytes for (axis, _), nbytes in sent if not axis.endswith(".near"))

    return with_accelerator(accelerator, model), counted


def train(row: str, name: str, batch: int, steps: int, blocks: int, folder: Path) -> None:
    """Train on this rank, and print the times and bytes of each block as JSON.

    Args:
        row: what to train.
        name: of the model.
        batch: samples of this rank in a step; 0 takes those of the model.
        steps: of a block that count.
        blocks: how many.
        folder: where ranks and the parent process meet.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = MODELS[name]
    step, counted = made(row, Gpt(size))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def timed() -> float:
        shape = (batch or size.batch, size.seq + 1)
        tokens = torch.randint(size.vocab, shape, generator=generator)
        start = time.perf_counter()
        step(tokens)
        return 1000 * (time.perf_counter() - start)

    for _ in range(RANK_ROUND + BETWEEN if is_local(row) else RANK_WARM_UP):
        timed()
    count = RANK_ROUND if is_local(row) else 1 + steps
    found = [block_of(index, count, timed, counted, folder) for index in range(blocks)]
    for action in AT_END:
        action()
    print(json.dumps({"blocks": found, "encoding_s": encoding_s(row, size)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def block_of(
    index: int, steps: int, timed: Callable[[], float], counted: Callable[[], int], folder: Path
) -> dict:
    """Run one block, once the limit for it is set."""
    if dist.get_rank() == 0:
        (folder / f"ask{index}").touch()
    while not (folder / f"go{index}").exists():
        time.sleep(0.01)
    dist.barrier()
    time.sleep(SETTLE_S)
    link, ledger, busy = link_bytes(), counted(), rank_processor_s()
    times = [timed() for _ in range(steps)]
    busy = rank_processor_s() - busy
    dist.barrier()
    time.sleep(SETTLE_S)
    link, ledger = link_bytes() - link, counted() - ledger
    return {"ms": times, "processor_s": busy, "link": link, "ledger": ledger}


def link_bytes() -> int:
    """Return the bytes that this host has sent over its link, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("no link eth0 in /proc/net/dev")


def rank_processor_s() -> float:
    """Return the processor seconds of all threads of this rank, in the kernel, too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def encoding_s(row: str, size: SimpleNamespace) -> float:
    """Return the processor seconds in which a row's methods encode and decode a whole model."""
    names = [] if is_peer(row) else [each for each in row.split("/")[1:] if each != EXACT]
    with torch.device("meta"):
        shapes = [p.shape for p in Gpt(size).parameters() if p.ndim > 1]
    total = 0.0
    options = rank_of(names[0])[1] if names else {}
    for name in (rank_of(each)[0] for each in names):
        kind = compressors().load(name)
        own = {each.name for each in fields(kind.Config)}
        method = kind(kind.Config(**{key: value for key, value in options.items() if key in own}))
        for shape in shapes:
            matrix = torch.randn(shape)
            before = rank_processor_s()
            method.rehearse(matrix)
            total += rank_processor_s() - before
    return total


# --- quality ---


sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "titles"))

RANKS = 2
SIZES = {
    "small": SimpleNamespace(layers=4, dim=128, heads=4, seq=128, vocab=256, batch=8),
    "ten": SimpleNamespace(layers=6, dim=384, heads=6, seq=128, vocab=256, batch=4),
}
"""0.87 and 10.9 million parameters."""

RATES = {"small": 2e-3, "ten": 6e-4}
"""Learning rates. With twice its rate the small model ends better, but then a change of any kind,
however small, moves its loss by 3%. With 2e-3 the larger model learns little for 700 steps."""

QUALITY_WARM_UP = 50

HELD_OUT, EVALUATED, EVERY_STEPS = 0.05, 64, 100
"""The share of packages that is held out, batches of an evaluation, steps between two of them."""

QUALITY_ROUND = 30
WARM_STEPS = 300
"""Exact steps before those of a method: a fifth of 1,500 steps."""

QUALITY_STREAMING = {
    "name": "local",
    "every": QUALITY_ROUND,
    "fragments": 3,
    "delay": 5,
    "keep": 0.5,
}
STREAMING_15 = {**QUALITY_STREAMING, "every": 15, "delay": 4, "warmup_steps": WARM_STEPS}
DDP: dict[str, Any] = {"name": "ddp"}
MOMENTUM: dict[str, Any] = {"name": "ddp", "exchange": "momentum"}
HYBRID_MOMENTUM: dict[str, Any] = {"name": "fsdp", "sharding": "hybrid", "exchange": "momentum"}
CHANCE: dict[str, Any] = {"rounding": "stochastic"}
QUALITY_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "exact": (DDP, {}),
    "bf16": (DDP, {"gradients": "bf16"}),
    "int8": (DDP, {"gradients": "int8"}),
    "int4": (DDP, {"gradients": "int4"}),
    "int8 by chance": (DDP, {"gradients": "int8", "options": {**CHANCE, "feedback": False}}),
    "int4 by chance": (DDP, {"gradients": "int4", "options": {**CHANCE, "feedback": False}}),
    "int4 by chance, feedback": (DDP, {"gradients": "int4", "options": CHANCE}),
    "onebit": (DDP, {"gradients": "onebit", "warmup_steps": 50}),
    "onebit adam": (MOMENTUM, {"gradients": "onebit", "warmup_steps": 300}),
    "onebit adam, fsdp": (HYBRID_MOMENTUM, {"gradients": "onebit", "warmup_steps": 300}),
    "exact, unclipped": (DDP, {}),
    "powersgd": (DDP, {"gradients": "powersgd", "warmup_steps": 50}),
    **{
        f"powersgd, rank {rank}": (
            DDP,
            {"gradients": "powersgd", "warmup_steps": 50, "options": {"rank": rank}},
        )
        for rank in (16, 32)
    },
    **{
        f"powersgd, rank {rank}, warmed": (
            DDP,
            {"gradients": "powersgd", "warmup_steps": WARM_STEPS, "options": {"rank": rank}},
        )
        for rank in (16, 32, 96)
    },
    "int4, blocks of 64": (DDP, {"gradients": "int4", "options": {"block": 64}}),
    "int4, warmed": (DDP, {"gradients": "int4", "warmup_steps": WARM_STEPS}),
    "int4, warmed, blocks of 64": (
        DDP,
        {"gradients": "int4", "warmup_steps": WARM_STEPS, "options": {"block": 64}},
    ),
    "topk": (DDP, {"gradients": "topk", "warmup_steps": 50}),
    "zero2, int8, updates int8": ({"name": "zero2"}, {"gradients": "int8", "parameters": "int8"}),
    "zero3, int8, values bf16": ({"name": "zero3"}, {"gradients": "int8", "parameters": "bf16"}),
    "local": ({"name": "local", "every": QUALITY_ROUND}, {}),
    "streaming": (QUALITY_STREAMING, {}),
    "streaming, int4": (QUALITY_STREAMING, {"gradients": "int4"}),
    "local, warmed": ({"name": "local", "every": QUALITY_ROUND, "warmup_steps": WARM_STEPS}, {}),
    "streaming, warmed": ({**QUALITY_STREAMING, "warmup_steps": WARM_STEPS}, {}),
    "streaming of 15, warmed": (STREAMING_15, {}),
    "streaming of 15, warmed, int4": (STREAMING_15, {"gradients": "int4"}),
    "streaming of 15, warmed, topk": (STREAMING_15, {"gradients": "topk"}),
    "streaming of 15, warmed, topk, no outer momentum": (
        {**STREAMING_15, "outer_momentum": 0.0, "outer_lr": 1.0},
        {"gradients": "topk"},
    ),
}

UNCLIPPED = ("onebit adam", "onebit adam, fsdp", "exact, unclipped")
"""Momenta are not clipped. ``exact, unclipped`` tells what exact training does without clipping."""


def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of training and of held-out packages, 1-D uint8."""
    from data import docstrings

    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for pair in docstrings():
        share = int.from_bytes(sha256(pair.group.encode()).digest()[:4]) / 2**32
        sides[share < HELD_OUT].append(f"{pair.title}\n\n{pair.text}\n\n".encode())
    train, test = (torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides)
    return train, test


def windows(text: Tensor, size: SimpleNamespace, generator: torch.Generator) -> Tensor:
    """Return a batch of random windows, (batch, seq + 1)."""
    starts = torch.randint(len(text) - size.seq - 1, (size.batch,), generator=generator)
    return torch.stack([text[start : start + size.seq + 1] for start in starts.tolist()]).long()


def quality_train(arguments: argparse.Namespace) -> None:
    """Train on this rank, and print the held-out losses on rank 0."""
    torch.set_num_threads(1)
    (row,), (seed,), size = arguments.rows, arguments.seeds, SIZES[arguments.model]
    strategy, far = QUALITY_ROWS[row]
    dist.init_process_group("gloo")  # NCCL refuses ranks that share a GPU
    config = {"strategy": strategy, "links": {"far": far}}
    accelerator = Accelerator(config=config, cpu=not arguments.gpu)
    device = accelerator.device
    kept = load_file(arguments.texts)
    torch.manual_seed(seed)
    model = Gpt(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: rate(step, arguments.steps))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    generator = torch.Generator().manual_seed(1000 * seed + accelerator.process_index)
    losses = {}
    for step in range(1, 1 + arguments.steps):
        batch = windows(kept["train"], size, generator).to(device)
        accelerator.backward(loss_of(model, batch))
        if row not in UNCLIPPED:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY_STEPS == 0 or step == arguments.steps:
            weights = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                losses[step] = held_out(weights, size, kept["test"], device)
            accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}), flush=True)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    dist.destroy_process_group()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine down to a tenth."""
    if step < QUALITY_WARM_UP:
        return (step + 1) / QUALITY_WARM_UP
    return 0.55 + 0.45 * math.cos(
        math.pi * (step - QUALITY_WARM_UP) / max(1, steps - QUALITY_WARM_UP)
    )


@torch.no_grad()
def held_out(
    weights: dict[str, Tensor], size: SimpleNamespace, text: Tensor, device: torch.device
) -> float:
    """Return the mean loss of weights on held-out text."""
    model = Gpt(size).to(device)
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    batches = (windows(text, size, generator).to(device) for _ in range(EVALUATED))
    losses = [float(loss_of(model, batch)) for batch in batches]
    return statistics.mean(losses)


def quality_run(row: str, seed: int, arguments: argparse.Namespace, kept: Path) -> dict[str, Any]:
    """Train a row in processes of its own, each a host, and return its held-out losses.

    In place of ``losses`` there is an ``error`` if a rank failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "quality", "--worker", "--texts", str(kept), "--rows", row]
    command += ["--seeds", str(seed), "--steps", str(arguments.steps), "--model", arguments.model]
    command += ["--lr", str(arguments.lr), *(["--gpu"] if arguments.gpu else [])]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ, "RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0",
                "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        error = f"{row}, seed {seed}:\n" + "\n".join(err[-3000:] for _, err in said)
        return {"row": row, "seed": seed, "error": error}
    lines = [line for line in said[0][0].splitlines() if line.startswith('{"losses"')]
    return {"row": row, "seed": seed, **json.loads(lines[-1])}


def known(results: Path, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of a file of results under the same conditions."""
    lines = results.read_text().splitlines() if results.exists() else []
    return [each for each in map(json.loads, lines) if setting.items() <= each.items()]


def by_seed(found: list[dict[str, Any]], row: str) -> dict[int, dict[int, float]]:
    """Return the held-out losses of a row by seed, each by step."""
    return {
        each["seed"]: {int(step): loss for step, loss in each["losses"].items()}
        for each in found
        if each["row"] == row
    }


def quality_table(found: list[dict[str, Any]], rows: list[str]) -> None:
    """Print the last losses of each row, and how far they are above exact ones of equal seeds."""
    print("| row | seeds | held-out loss | more than exact, each seed | mean | spread |")
    print("|---|---|---|---|---|---|")
    exact = {seed: losses[max(losses)] for seed, losses in by_seed(found, "exact").items()}
    for row in rows:
        last = {seed: losses[max(losses)] for seed, losses in by_seed(found, row).items()}
        if not last:
            continue
        line = f"| {row} | {len(last)} | {statistics.mean(last.values()):.4f} |"
        more = [last[seed] / exact[seed] - 1 for seed in sorted(last) if seed in exact]
        if row == "exact" or not more:
            each = ", ".join(f"{last[seed]:.4f}" for seed in sorted(last))
            print(f"{line} {each} | - | {max(last.values()) - min(last.values()):.4f} |")
            continue
        each, spread = ", ".join(f"{one:+.1%}" for one in more), max(more) - min(more)
        print(f"{line} {each} | {statistics.mean(more):+.1%} | {spread:.1%} |")


def draw(found: list[dict[str, Any]], rows: list[str], target: Path) -> None:
    """Draw the mean curves of all rows, and below how far each is above exact, equal seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True)
    exact = by_seed(found, "exact")
    for row in rows:
        runs = {seed: losses for seed, losses in by_seed(found, row).items() if seed in exact}
        if not runs:
            continue
        steps = sorted(next(iter(runs.values())))
        means = [statistics.mean(run[step] for run in runs.values()) for step in steps]
        label = f"{row} ({len(runs)})"
        (line,) = curves.plot(steps, means, label=label, linewidth=1.2)
        if row == "exact":
            continue
        more = [
            statistics.mean(100 * (run[step] / exact[seed][step] - 1) for seed, run in runs.items())
            for step in steps
        ]
        apart.plot(steps, more, color=line.get_color(), label=label, linewidth=1.2)
    curves.set_ylabel("held-out loss, nats per byte")
    apart.set_ylabel("more than exact, %")
    apart.axhline(0.0, color="black", linewidth=0.8)
    apart.set_xlabel("optimizer steps")
    curves.legend(fontsize=8, title="row (seeds)")
    figure.savefig(target, dpi=110)


def quality_main() -> None:
    """Compares the held-out loss of methods for slow links with exact training.

    ::

        python benchmarks/links.py quality --results quality.jsonl --figure quality.png
        python benchmarks/links.py quality --model ten --results ten.jsonl  # 15 minutes per run
        python benchmarks/links.py quality --model ten --gpu --at-once 8 --results ten.jsonl
        python benchmarks/links.py quality --rows exact int8 --seeds 0 --steps 300  # a few minutes

    A GPT learns the bytes of docstrings of the installed packages; each package is trained on, or
    held out. Every row sees the same batches in the same order, on two ranks that count as two
    hosts. The loss is that of ``get_state_dict``, so of the outer weights under ``local``, in nats
    per byte. A run whose line is in the file of results is not run again, so the command can be
    interrupted.

    With ``--gpu`` all ranks share one GPU, and exchange through the host's memory. ``--texts``
    names a file for the text: another machine, with other packages, then trains on the same.
    """
    parser = argparse.ArgumentParser(description=str(quality_main.__doc__).splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--lr", type=float, help="by default that of the model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", choices=QUALITY_ROWS, default=list(QUALITY_ROWS))
    parser.add_argument("--results", type=Path, default=Path("link_quality.jsonl"))
    parser.add_argument("--figure", type=Path, help="a PNG of the curves; needs matplotlib")
    parser.add_argument("--gpu", action="store_true", help="ranks share the GPU")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--texts", type=Path, help="safetensors of the text; made if absent")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("expected a GPU for --gpu, found none; leave it out")
    arguments.lr = arguments.lr or RATES[arguments.model]
    if arguments.worker:
        quality_train(arguments)
        return
    size = SIZES[arguments.model]
    with tempfile.TemporaryDirectory() as folder, ThreadPool(arguments.at_once) as pool:
        kept = arguments.texts or Path(folder) / "texts.safetensors"
        if not kept.exists():
            training, test = texts()
            save_file({"train": training, "test": test}, kept)
        text = load_file(kept)["train"]
        tokens = RANKS * size.batch * size.seq * arguments.steps
        parameters = sum(p.numel() for p in Gpt(size).parameters())
        print(f"{parameters:,} parameters, {len(text):,} bytes of training text, {tokens:,} "
              "tokens per run\n", flush=True)  # fmt: skip
        # Losses are compared under the same conditions alone.
        setting = {key: getattr(arguments, key) for key in ("model", "steps", "lr", "gpu")}
        setting["text"] = sha256(text.numpy().tobytes()).hexdigest()[:12]
        found = known(arguments.results, setting)
        done = {(each["row"], each["seed"]) for each in found}
        left = [(row, seed) for seed in arguments.seeds for row in arguments.rows
                if (row, seed) not in done]  # fmt: skip
        errors = []
        for line in pool.imap_unordered(lambda each: quality_run(*each, arguments, kept), left):
            if "error" in line:
                errors.append(line["error"])
                continue
            found.append(setting | line)
            with arguments.results.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    if errors:
        sys.exit("\n".join(errors))
    quality_table(found, arguments.rows)
    if arguments.figure:
        draw(found, arguments.rows, arguments.figure)


# --- encodings ---


METHODS = ("int8", "int4", "onebit", "topk", "powersgd")


def nanoseconds(method: Compressor[Any], matrix: torch.Tensor, rounds: int) -> float:
    """Return the processor time of a number, in ns."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        method.rehearse(matrix)
        spent.append(time.process_time() - start)
    return min(spent) / matrix.numel() * 1e9


def encodings_main() -> None:
    """Times the arithmetic of methods per number, compiled and by operations of torch.

    ::

        python benchmarks/links.py encodings

    Encoding with its kept error, adding a message and decoding a sum, for one matrix on one core.
    The figures are processor time: the least of several rounds, since other work only adds to it.
    """
    parser = argparse.ArgumentParser(description=str(encodings_main.__doc__).splitlines()[0])
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
    run_program(
        {
            "rates": rates_main,
            "quality": quality_main,
            "encodings": encodings_main,
        }
    )
