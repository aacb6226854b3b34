"""One rank of a run that ``slow_links.py`` times: a row by its name, block after block.

A row is one of:

- ``STRATEGY/GRADIENTS``, or ``STRATEGY/GRADIENTS/PARAMETERS`` with a method for parameters;
  ``hybrid`` is fsdp with ``sharding: hybrid``, ``zero3+secondary`` and ``fsdp+secondary`` are
  zero3 and fsdp with ``secondary: host``, ``momentum`` and ``hybrid+momentum`` are ddp and hybrid
  with momenta in place of gradients (1-bit Adam with the method ``onebit``); ``powersgd:16`` has
  another rank than the default, and so has ``powersgd`` for parameters in the same row;
- ``local/GRADIENTS``: Streaming DiLoCo with ``ddp`` inside of a host; a block is a whole round, and
  no exchange is under way at its edges;
- a peer of ``side_by_side.py``, such as ``torch_fsdp2`` or ``deepspeed_z3``.
"""

import json
import resource
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from ddp_step import Gpt
from side_by_side import AT_END, MODELS, Step, with_accelerator
from side_by_side import ROWS as PEERS
from torch import nn

from drivetrain import Accelerator
from drivetrain.links.chosen import EXACT
from drivetrain.registry import compressors

WARM_UP = 3
SETTLE_S = 0.5
"""Time for what a step has left under way, such as gathers of parameters: its bytes count, too."""

BUCKET_MIB = 8
"""Of momenta: the last bucket is on the link when backward has ended, so it should be small."""

HYBRID = {"name": "fsdp", "sharding": "hybrid"}
ROUND, FRAGMENTS, DELAY = 36, 6, 5
STREAMING = {"name": "local", "every": ROUND, "fragments": FRAGMENTS, "delay": DELAY, "keep": 0.5}
BETWEEN = DELAY + (ROUND // FRAGMENTS - DELAY) // 2
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
        "local": STREAMING,
    }
    far: dict[str, object] = {"gradients": gradients, "parameters": parameters, "options": rank}
    if name.endswith("momentum"):
        far["warmup_steps"] = WARM_UP - 1
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

    for _ in range(ROUND + BETWEEN if is_local(row) else WARM_UP):
        timed()
    count = ROUND if is_local(row) else 1 + steps
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
    link, ledger, busy = link_bytes(), counted(), processor_s()
    times = [timed() for _ in range(steps)]
    busy = processor_s() - busy
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


def processor_s() -> float:
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
            before = processor_s()
            method.rehearse(matrix)
            total += processor_s() - before
    return total
