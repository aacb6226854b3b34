"""Times the parts of offload and whole steps with it, and its memory."""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from programs import run_program
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from drivetrain import Accelerator
from drivetrain.store import ShardSpec, ShardStep
from drivetrain_offload import stepping as disk_steps
from drivetrain_offload.nvme import DiskFile, NvmeStore
from drivetrain_offload.options import NvmeConfig
from drivetrain_offload.stepping import (
    SETS,
    NvmeStepper,
    ShardBlock,
    ShardWork,
    Tile,
    TileBuffers,
    cut,
)
from drivetrain_offload.tiles import Piece, Rule, Tiler, aligned_empty, update_rule

# --- step ---


STEP_WIDTH, WORDS, STEP_TOKENS = 768, 4096, 64


def model_of(layers: int) -> nn.Module:
    """Return a transformer of about seven million parameters per layer."""
    layer = nn.TransformerEncoderLayer(
        STEP_WIDTH, 12, 4 * STEP_WIDTH, dropout=0.0, batch_first=True
    )
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, STEP_WIDTH), body, nn.Linear(STEP_WIDTH, WORDS))


def way(strategy: dict[str, object], layers: int, batch: int, low: bool) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""
    precision = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}} if low else {}
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(strategy=strategy, cpu=not gpu, **precision)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = model_of(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def loss_of(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    def step() -> float:
        ids = torch.randint(WORDS, (batch, STEP_TOKENS), device=accelerator.device)
        start = time.perf_counter()
        accelerator.backward(loss_of(ids))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def step_main() -> None:
    """Times training steps with optimizer state in stores against the same strategy without.

    ::

        python benchmarks/offload.py step --path DIRECTORY
        drivetrain launch --nproc-per-node 2 benchmarks/offload.py step --path DIRECTORY

    Every way trains a model of its own; steps of all ways alternate, in an order that changes, so
    that each step is timed beside its neighbors. A ratio is the median over rounds of the quotient
    within a round. A step is forward, backward, clipping, optimizer and clearing; the time until
    parameters are there for the next step counts with that. On a GPU, where there is one,
    ``memory`` has everything there, and the tokens per second of ``cpu`` should be at least 0.85 of
    its own.
    """
    parser = argparse.ArgumentParser(description=str(step_main.__doc__).partition("\n")[0])
    parser.add_argument("--path", required=True, help="directory on a local disk")
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--low", action="store_true", help="bf16 parameters with fp32 masters")
    arguments = parser.parse_args()
    base = {"name": arguments.strategy}
    disk = {"optimizer": "nvme", "path": arguments.path}
    options = {
        "memory": base,
        "cpu": {**base, "offload": {"optimizer": "cpu"}},
        "nvme": {**base, "offload": {**disk, "store_options": {"release_memory": False}}},
    }
    ways = {
        name: way(strategy, arguments.layers, arguments.batch, arguments.low)
        for name, strategy in options.items()
    }
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 2):
        names = list(ways)
        order.shuffle(names)
        for name in names:
            # A step waits for the update of the step before: two in a row make it whole.
            found = ways[name]() + ways[name]()
            if number >= 2:
                seconds[name].append(found / 2)
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["memory"], strict=True))
        median = statistics.median(found)
        speed = arguments.batch * STEP_TOKENS / median
        print(f"{name:8} {median * 1e3:8.0f} ms  {speed:8.0f} tokens/s  {ratio:.3f} of memory")


# --- disk ---


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


def disk_main() -> None:
    """Times the file of the store nvme against fio on the same file system, in turns.

    ::

        python benchmarks/offload.py disk /mnt/nvme --mib 1024 --request-mib 4 --threads 8

    Both overwrite and read one preallocated file sequentially, past the page cache, with the same
    request size and as many requests in flight; fio through libaio, three times over in every turn,
    so that the first touch of its fresh buffers counts little. Rates are medians over the turns, a
    ratio is the median of the turns' ratios: a disk's speed drifts. Our buffers lie in transparent
    huge pages. fio's do where pages are set aside (sysctl vm.nr_hugepages=64): that row is the
    equal match. Without fio on the PATH (Debian: apt-get install fio) only ours are printed.
    """
    parser = argparse.ArgumentParser(
        description=str(disk_main.__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
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


# --- memory ---


MEMORY_WIDTH, HIDDEN, MEMORY_TOKENS = 1024, 6144, 16
STATE_BYTES = 12
"""Of AdamW, per parameter: an fp32 master and two fp32 moments."""
Found = dict[str, Any]
CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),
)


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MEMORY_WIDTH)
        self.up = nn.Linear(MEMORY_WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, MEMORY_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def train(blocks: int, steps: int, path: str) -> Found:
    """Train, and say what it took; with a path, state and parameters lie there."""
    store = {"optimizer": "nvme", "params": "nvme", "path": path}
    small = {"staging_mib": 64.0}
    offload = {"offload": {**store, "store_options": small}} if path else {}
    accelerator = Accelerator(
        strategy={"name": "zero3", "keep_below": 0, "buffers_in_flight": 2, **offload},
        mixed_precision="bf16",
        config={"dtypes": {"param": "bf16"}},
        cpu=True,
    )
    torch.manual_seed(0)
    with accelerator.building():
        model = nn.Sequential(*(Block() for _ in range(blocks)))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        inputs = torch.randn(MEMORY_TOKENS, MEMORY_WIDTH, generator=generator)
        loss = (model(inputs.bfloat16()).float() - inputs).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    accelerator.free_memory()
    return {"numel": numel, "losses": losses, "seconds": seconds, "peak": peak_bytes()}


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextmanager
def limited(nbytes: int) -> Iterator[Path | None]:
    """Make a memory cgroup of so many bytes; None where that is not possible."""
    for root, knob in CGROUPS:
        group = root / f"drivetrain-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / knob).write_text(str(nbytes), encoding="ascii")
            yield group
        except OSError:
            continue
        else:
            return
        finally:
            group.rmdir()
    yield None


def run(arguments: argparse.Namespace, path: str, group: Path | None) -> Found:
    """Train in a process of its own, in a cgroup if there is one."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as report:
        command = [sys.executable, __file__, "memory", "--child", report.name, "--path", path]
        command += ["--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

        done = subprocess.run(command, check=False, preexec_fn=enter)
        if done.returncode:
            sys.exit(f"the training {'with' if path else 'without'} a disk ended: {done}")
        found: Found = json.load(report)
        return found


def memory_main() -> None:
    """Trains a model whose optimizer state is four times the memory that the process may use.

    ::

        python benchmarks/offload.py memory --path DIRECTORY
        python benchmarks/offload.py memory --path DIRECTORY --blocks 8 --without-limit

    Two processes train the same model from the same seed on one rank, bf16 parameters with fp32
    masters: one with everything in memory, one with parameters and optimizer state in the store
    ``nvme``. The second may use a quarter of the bytes of the optimizer state (masters, two
    moments): a memory cgroup holds it to that, page cache included, where the machine lets one be
    made; its peak resident memory is read in any case. Losses must be equal to the last bit.
    """
    parser = argparse.ArgumentParser(description=str(memory_main.__doc__).partition("\n")[0])
    parser.add_argument("--path", required=True, help="directory on a local disk")
    parser.add_argument("--blocks", type=int, default=60, help="12.6 million parameters each")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--without-limit", action="store_true", help="only look at the peak")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        report = train(arguments.blocks, arguments.steps, arguments.path)
        Path(arguments.child).write_text(json.dumps(report), encoding="utf-8")
        return
    numel = arguments.blocks * sum(p.numel() for p in Block().parameters())
    budget = STATE_BYTES * numel // 4
    with nullcontext(None) if arguments.without_limit else limited(budget) as group:
        disk = run(arguments, arguments.path, group)
    memory = run(arguments, "", None)
    same = disk["losses"] == memory["losses"]
    print(f"parameters {numel:,}; optimizer state {STATE_BYTES * numel / 2**30:.2f} GiB")
    print(f"budget {budget / 2**30:.2f} GiB, {'held by a cgroup' if group else 'not enforced'}")
    for name, found in (("disk", disk), ("memory", memory)):
        seconds = sorted(found["seconds"])[len(found["seconds"]) // 2]
        print(f"{name:8} peak {found['peak'] / 2**30:.2f} GiB, step {seconds:.1f} s")
    print(f"losses {'equal to the last bit' if same else 'DIFFER'}: {disk['losses']}")
    ratio = STATE_BYTES * numel / disk["peak"]
    print(f"optimizer state is {ratio:.2f} x the peak")
    sys.exit(0 if same else 1)


# --- optimizer ---


MI = 1 << 20
FACTOR = 0.37
Update = Callable[[], object]


class Shard:
    """What every way has for itself, so that none finds its data in the cache."""

    def __init__(self, numel: int) -> None:
        self.master = torch.randn(numel)
        self.gradient = torch.randn(numel).bfloat16()
        self.out = torch.zeros(numel, dtype=torch.bfloat16)
        self.wide = torch.zeros(numel)


def whole(shard: Shard, optimizer: Optimizer, factor: float | None = None) -> Update:
    """Return cast, step, cast; the optimizer decides how its step is computed."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = shard.wide

    def update() -> None:
        shard.wide.copy_(shard.gradient)
        if factor is not None:
            shard.wide.mul_(factor)
        optimizer.step()
        shard.out.copy_(parameter.detach())

    return update


def tiled(shard: Shard, tiler: Tiler, factor: float = 1.0) -> Update:
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    group = optimizer.param_groups[0]
    rule: Rule | None = update_rule(optimizer)
    assert rule is not None
    states = {name: torch.zeros_like(shard.master) for name in rule.states(group)}
    piece = Piece(shard.master, shard.gradient, states, shard.out)
    taken = itertools.count()
    return lambda: tiler.update_all([(rule.step(group, next(taken), factor), piece)])


def copy(numel: int) -> Update:
    source, target = (torch.ones(numel * 14 // 4) for _ in range(2))
    return lambda: target.copy_(source)


def deepspeed(numel: int) -> Update | None:
    """Return the step of DeepSpeedCPUAdam, or None where it is missing or does not build."""
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            shard = Shard(numel)
            parameter = torch.nn.Parameter(shard.master)
            update = whole(shard, DeepSpeedCPUAdam([parameter], adamw_mode=True))
            update()
    except Exception as error:  # whatever a build can fail with
        print(f"deepspeed left out: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        return None
    return update


def optimizer_ways(numel: int, tiler: Tiler, *, peer: bool) -> dict[str, Update]:
    def adamw(shard: Shard, **how: bool) -> Optimizer:
        return AdamW([torch.nn.Parameter(shard.master)], **how)

    shards = [Shard(numel) for _ in range(3)]
    made = {
        "tiled": tiled(Shard(numel), tiler),
        "whole": whole(shards[0], adamw(shards[0], fused=True)),
        "tiled * factor": tiled(Shard(numel), tiler, FACTOR),
        "whole * factor": whole(shards[1], adamw(shards[1], fused=True), FACTOR),
        "foreach": whole(shards[2], adamw(shards[2], foreach=True)),
        "copy": copy(numel),
    }
    built = deepspeed(numel) if peer else None
    return made | ({"deepspeed": built} if built else {})


def optimizer_measure(made: dict[str, Update], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (clock, processor) seconds of every round, for every way."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for update in made.values():  # the first touch of the memory, and the states
        update()
    for _ in range(rounds):
        for name in random.sample(list(made), len(made)):
            clock, processor = time.perf_counter(), time.process_time()
            made[name]()
            now = time.perf_counter(), time.process_time()
            seconds[name].append((now[0] - clock, now[1] - processor))
    return seconds


def quotient(above: list[tuple[float, float]], below: list[tuple[float, float]]) -> str:
    pairs = list(zip(above, below, strict=True))
    clock, processor = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
    return f"{clock:.2f} / {processor:.2f}"


def optimizer_report(
    seconds: dict[str, list[tuple[float, float]]], numel: int, threads: int
) -> None:
    mine = seconds["tiled"]
    for name, theirs in seconds.items():
        clocks, processors = zip(*theirs, strict=True)
        print(
            f"| {numel // MI} Mi | {threads} | {name} | {1e3 * statistics.median(clocks):.2f} ms "
            f"| {1e3 * min(clocks):.2f} ms | {1e3 * statistics.median(processors):.2f} ms "
            f"| {quotient(theirs, mine)} |"
        )
    clipped = quotient(seconds["whole * factor"], seconds["tiled * factor"])
    print(
        f"  tiled: {quotient(seconds['whole'], mine)} x the speed of whole (goal 1.3), "
        f"{clipped} x with a factor, {quotient(mine, seconds['copy'])} x the time of copy "
        f"(goal at most 1.5), {quotient(seconds['foreach'], mine)} x the speed of foreach "
        "(goal 1.5)",
        flush=True,
    )


def optimizer_main() -> None:
    """Times the tiled CPU optimizer against other ways to take an AdamW step, and a plain copy.

    ::

        python benchmarks/offload.py optimizer
        python benchmarks/offload.py optimizer --sizes 16 --threads 2 --rounds 31

    fp32 masters and moments, bf16 gradients and parameters. ``whole`` casts the gradient, calls the
    fused kernel and casts the parameter, each over the whole tensor; ``foreach`` is torch's foreach
    AdamW between the same casts; ``copy`` moves as many bytes as the step must, 14 per parameter
    read and 14 written; ``deepspeed`` is DeepSpeedCPUAdam between a cast gradient and a cast
    parameter, where it can be built. Rows with ``* factor`` clip as well. All take turns, in an
    order that changes; a ratio is the median over rounds of the quotient within a round.
    ``processor`` is the time that the process computed, all its threads together: with one thread
    it does not count the time when others had the processor. Two ratios are given: of the clock,
    and of the processor.
    """
    parser = argparse.ArgumentParser(description=str(optimizer_main.__doc__).splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="in Mi elements")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-peer", action="store_true", help="do not build DeepSpeedCPUAdam")
    options = parser.parse_args()
    print("| elements | threads | way | median | best | processor | time / tiled |")
    print("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        with contextlib.closing(Tiler(threads)) as tiler:
            for size in options.sizes:
                made = optimizer_ways(size * MI, tiler, peer=not options.no_peer)
                optimizer_report(optimizer_measure(made, options.rounds), size * MI, threads)


# --- pipeline ---


NAMES = ("exp_avg", "exp_avg_sq", "master")
Way = Callable[[], object]


def block_of(numel: int, shards: int, optimizer: AdamW, stepper: NvmeStepper) -> list[ShardStep]:
    """Adopt one block, and return a step of it."""
    group = optimizer.param_groups[0]
    length = numel // shards
    stepper.adopt("all", [ShardSpec(length, torch.float32, True)] * shards, group)
    gradients = torch.randn(numel).bfloat16().split(length)
    outs = torch.zeros(numel, dtype=torch.bfloat16).split(length)
    return [ShardStep(i, group, gradients[i], None, outs[i], 0.37) for i in range(shards)]


def pipeline(store: NvmeStore, stepper: NvmeStepper, steps: list[ShardStep]) -> Way:
    def step() -> None:
        stepper.submit("all", steps).wait()
        store.flush()

    return step


def buffer_sets(nbytes: int) -> list[TileBuffers]:
    sets = [TileBuffers(nbytes) for _ in range(SETS)]
    for buffers in sets:
        buffers.provide(NAMES)
    return sets


def disk(store: NvmeStore, keys: dict[str, str], tiles: list[Tile], nbytes: int) -> Way:
    sets = buffer_sets(nbytes)

    def move() -> None:
        reads = sets[0].read(store, keys, tiles[0])
        for i, tile in enumerate(tiles):
            arrived = reads
            if i + 1 < len(tiles):
                reads = sets[(i + 1) % SETS].read(store, keys, tiles[i + 1])
            for read in arrived:
                read.wait()
            sets[i % SETS].write(store, keys, tile)
        store.flush()

    return move


def update(tiler: Tiler, keys: dict[str, str], tiles: list[Tile], nbytes: int) -> Way:
    sets = buffer_sets(nbytes)
    for buffers in sets:
        for name in NAMES:
            buffers._tensors[name].zero_()

    def compute() -> None:
        for i, tile in enumerate(tiles):
            tiler.update_all(sets[i % SETS].updates(keys, tile))

    return compute


def pipeline_ways(
    numel: int, shards: int, store: NvmeStore, tiler: Tiler
) -> tuple[dict[str, Way], Way]:
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    stepper = store.stepper(optimizer)
    rule = update_rule(optimizer)
    assert stepper is not None
    assert rule is not None
    steps = block_of(numel, shards, optimizer, stepper)
    block: ShardBlock = stepper._blocks["all"]
    begun = rule.step(optimizer.param_groups[0], 0.0, 0.37)
    works = [ShardWork(block.shards[step.index], step, begun, {}) for step in steps]
    nbytes = stepper._tile_bytes
    tiles = list(cut(works, nbytes))
    keys = {name: stepper._key(block, name) for name in NAMES}
    made = {
        "pipeline": pipeline(store, stepper, steps),
        "disk": disk(store, keys, tiles, nbytes),
        "update": update(tiler, keys, tiles, nbytes),
    }
    return made, stepper.close


def pipeline_measure(made: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round, for every way."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for way in made.values():  # the first touch of memory and disk
        way()
        way()
    for _ in range(rounds):
        for name in random.sample(list(made), len(made)):
            start = time.perf_counter()
            made[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def pipeline_report(seconds: dict[str, list[float]], numel: int, shards: int, threads: int) -> None:
    moved = {"pipeline": 24 * numel, "disk": 24 * numel, "update": 0}
    for name, each in seconds.items():
        middle = statistics.median(each)
        print(
            f"| {numel // MI} Mi | {shards} | {threads} | {name} | {1e3 * middle:.0f} ms "
            f"| {1e3 * min(each):.0f} to {1e3 * max(each):.0f} ms "
            f"| {moved[name] / middle / MI:,.0f} MiB/s |"
        )
    rounds = zip(*(seconds[name] for name in ("pipeline", "disk", "update")), strict=True)
    ratios = sorted(ours / max(others) for ours, *others in rounds)
    print(
        f"  pipeline: {statistics.median(ratios):.2f} x the longer of disk and update "
        f"(goal at most 1.15; rounds {ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def pipeline_main() -> None:
    """Times AdamW steps over states on a disk against what the disk and the processor take alone.

    ::

        python benchmarks/offload.py pipeline --path DIRECTORY
        python benchmarks/offload.py pipeline --path DIRECTORY --sizes 16 --shards 40 --rounds 5

    fp32 masters and moments on the disk, bf16 gradients and parameters in memory. ``pipeline`` is a
    step of the store's stepper until everything is on the disk. ``disk`` reads and writes the same
    tiles of the same file through as many sets of buffers, and computes nothing. ``update`` updates
    tiles in such buffers, and neither reads nor writes. All take turns, in an order that changes; a
    ratio is the median over rounds of the quotient within a round, of the pipeline's time and the
    longer of the two others (goal: at most 1.15).
    """
    parser = argparse.ArgumentParser(description=str(pipeline_main.__doc__).splitlines()[0])
    parser.add_argument("--path", required=True, help="directory on the disk")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], help="in Mi elements")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 100], help="in the block")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--tile-mib", type=float, default=disk_steps.TILE_BYTES / MI)
    parser.add_argument("--request-mib", type=float, default=NvmeConfig().request_mib)
    parser.add_argument("--requests", type=int, default=NvmeConfig().threads, help="at once")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    disk_steps.TILE_BYTES = int(options.tile_mib * MI)
    config = NvmeConfig(
        path=options.path, request_mib=options.request_mib, threads=options.requests
    )
    print("| elements | shards | threads | way | median | range | disk |")
    print("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for size in options.sizes:
            for shards in options.shards:
                store = NvmeStore(config)
                with contextlib.closing(Tiler(threads)) as tiler:
                    made, close = pipeline_ways(size * MI, shards, store, tiler)
                    pipeline_report(
                        pipeline_measure(made, options.rounds), size * MI, shards, threads
                    )
                close()
                store.close()


if __name__ == "__main__":
    run_program(
        {
            "step": step_main,
            "disk": disk_main,
            "memory": memory_main,
            "optimizer": optimizer_main,
            "pipeline": pipeline_main,
        }
    )
