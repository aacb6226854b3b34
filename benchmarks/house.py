"""Counts what a reader of the source meets, times what a step costs, and compares two versions."""

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from programs import run_program
from source_tree import ROOTS, Function, SourceTree, counts_of, function_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import drivetrain
from drivetrain import Accelerator

# --- table ---


HERE = Path(__file__).resolve().parent
Rows = dict[str, float]
"""The figures of one checkout, by the name of their row."""


# --- read from the source ---


def count_modules(tree: SourceTree) -> Rows:
    return {"modules": len(tree.modules), "lines": tree.lines}


def count_names(tree: SourceTree) -> Rows:
    return {
        "class names in two or more files": len(tree.homonyms("class")),
        "function names in two or more files": len(tree.homonyms("function")),
    }


def count_circles(tree: SourceTree) -> Rows:
    files, folders = tree.file_circles(), tree.folder_circles()
    return {
        "circles among files": len(files),
        "files in them": sum(map(len, files)),
        "circles among folders": len(folders),
        "folders and files in them": sum(map(len, folders)),
    }


# --- run on ranks ---


def run(root: Path, ranks: int, *arguments: str) -> dict[str, dict[str, float]]:
    """Run this program on ranks of a checkout; return what its rank 0 printed.

    Raises:
        RuntimeError: it failed, or the checkout's interpreter runs another checkout's code.
    """
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    sources = os.pathsep.join(str(root / part) for part in ROOTS)
    finished = subprocess.run(
        [python, "-W", "ignore", *launcher, str(HERE / "house.py"), "runs", *arguments],
        env={**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{root}: {' '.join(arguments)} failed:\n{finished.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    if Path(result["root"]) != root:
        raise RuntimeError(
            f"expected the code of {root}, but its interpreter {python} runs that of "
            f"{result['root']}; install the checkout into {root}/.venv"
        )
    return result["rows"]  # type: ignore[no-any-return]


def count_trace(root: Path) -> Rows:
    return {
        f"step of {side}: {what}": count
        for side, counts in run(root, 2, "trace").items()
        for what, count in counts.items()
    }


def count_passes(root: Path) -> Rows:
    return {
        f"megatron prepare() of {model}, {layout}: {what}": count
        for layout, ranks in (("tp=2", 2), ("tp=2 pp=2", 4))
        for model, counts in run(root, ranks, "passes").items()
        for what, count in counts.items()
    }


def time_host(root: Path, steps: int) -> Rows:
    return {
        f"step of {side}, ms: {clock}": milliseconds
        for side, clocks in run(root, 2, "host", "--steps", str(steps)).items()
        for clock, milliseconds in clocks.items()
    }


# --- the command ---


def timed_in_turn(roots: Sequence[Path], options: argparse.Namespace) -> list[Rows]:
    """Return the median over rounds of each checkout's times, each first as often as the others."""
    series: list[dict[str, list[float]]] = [defaultdict(list) for _ in roots]
    for turn in range(options.rounds):
        for place in range(len(roots)):
            column = (turn + place) % len(roots)
            for name, value in time_host(roots[column], options.steps).items():
                series[column][name].append(value)
    return [{name: statistics.median(v) for name, v in rows.items()} for rows in series]


READ: Mapping[str, Callable[[SourceTree], Rows]] = {
    "modules": count_modules,
    "names": count_names,
    "circles": count_circles,
}
RUN: Mapping[str, Callable[[Path], Rows]] = {"trace": count_trace, "passes": count_passes}


def measure(options: argparse.Namespace) -> list[Rows]:
    """Return the figures of each root."""
    columns: list[Rows] = []
    for root in options.root:
        tree = SourceTree(root)
        rows: Rows = {}
        for name, count in READ.items():
            rows |= count(tree) if name in options.only else {}
        for name, count_run in RUN.items():
            rows |= count_run(root) if name in options.only else {}
        columns.append(rows)
    if "host" in options.only:
        times = timed_in_turn(options.root, options)
        columns = [{**rows, **more} for rows, more in zip(columns, times, strict=True)]
    return columns


def table(columns: Sequence[Rows], roots: Sequence[Path]) -> str:
    """Return a Markdown table: a row for each figure, a column for each checkout."""
    lines = [
        "| | " + " | ".join(root.name for root in roots) + " |",
        "|---" * (len(roots) + 1) + "|",
    ]
    for name in dict.fromkeys(name for rows in columns for name in rows):
        values = (rows.get(name) for rows in columns)
        cells = (
            "" if v is None else f"{v:,.2f}" if isinstance(v, float) else f"{v:,}" for v in values
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_main() -> None:
    """Counts what a reader of the source meets, and what a step costs where the model does not.

    ::

        python benchmarks/house.py table  # this checkout
        python benchmarks/house.py table --root ../older --root .  # a column for each
        python benchmarks/house.py table --only modules circles --json

    A checkout is run by the interpreter of its ``.venv``, if it has one, else by this one. Two to
    four processes on this machine, gloo, a thread each; ``source_tree.py`` and this file say how
    everything is counted.
    """
    parser = argparse.ArgumentParser(description=str(table_main.__doc__).partition("\n")[0])
    kinds = (*READ, *RUN, "host")
    parser.add_argument("--root", type=Path, action="append", help="a checkout; default this one")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=5, help="of timing, each with new processes")
    parser.add_argument("--steps", type=int, default=60, help="of each strategy in a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.root = [root.resolve() for root in options.root or [HERE.parent]]
    columns = measure(options)
    if options.json:
        print(json.dumps({str(r): rows for r, rows in zip(options.root, columns, strict=True)}))
    else:
        print(table(columns, options.root))


# --- runs ---


Step = Callable[[], Tensor]

RUNS_STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},  # by default, it divides no parameter so small
    "fsdp": {"name": "fsdp"},
}
PEER, BARE = "torch FSDP2", "bare"
WARMUP = 6
"""Steps before anything is counted: units record their order, rings and buffers are made."""

WORDS = 64


class Block(nn.Module):
    """Two small products, a norm and a residual: next to no work, six parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def training(side: str, options: argparse.Namespace) -> Step:
    """Return a training step of the net: bare, under a strategy of ours, or torch's FSDP2."""
    torch.manual_seed(0)
    net, side, low = Net(options.blocks, options.width), side.removesuffix(LOW), side.endswith(LOW)
    adamw = functools.partial(torch.optim.AdamW, fused=options.fused or None)
    backward: Any = Tensor.backward
    model: Any = net
    if side in (BARE, PEER):
        if side == PEER:
            bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low else {}
            shared = {
                "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
                "mp_policy": MixedPrecisionPolicy(**bf16),
            }
            for module in (net.token, *net.blocks, net.head):
                fully_shard(module, **shared)
            model = fully_shard(net, **shared)
        optimizer: Any = adamw(model.parameters())
    else:
        dtypes = {"config": {"dtypes": {"param": "bf16", "reduce": "fp32"}}} if low else {}
        given: Any = {"strategy": RUNS_STRATEGIES[side], "cpu": True, **dtypes}
        accelerator = Accelerator(mixed_precision="bf16" if low else "no", **given)
        model, optimizer = accelerator.prepare(net, adamw(net.parameters()))
        backward = accelerator.backward
    tokens = torch.randint(WORDS, (2, 4))

    def step() -> Tensor:
        loss = model(tokens).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# --- what a step meets ---


AROUND = (
    "accelerator.py",
    "facade/",
    "processes.py",
    "runtime/",
    "collectives/",
    "cost.py",  # of it, a step meets the ledger alone
)
"""What lies around a strategy in the core."""


def trace(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the functions and files that one step meets on the main thread.

    ``all`` are those below the folder of the checkout. ``functions`` leaves out the facade and the
    collectives, as those of FSDP2 are in ``torch.distributed.fsdp`` alone, and neither the loop nor
    ``torch.distributed``. Functions are told apart by file, first line and name, so lambdas and
    comprehensions count as well.
    """
    package = Path(drivetrain.__file__).parents[2]
    core = package / "src" / "drivetrain"
    around = tuple(f"{core}/{path}" for path in AROUND)
    peer = Path(torch.__file__).parent / "distributed" / "fsdp"
    counts = {}
    for side in (*RUNS_STRATEGIES, PEER):
        met = functions_met(training(side, options))
        home = peer if side == PEER else package
        everything = {key for key in met if key[0].startswith(f"{home}/")}
        ours = {key for key in everything if not key[0].startswith(around)}
        plugin = {key for key in ours if key[0].startswith(f"{package}/plugins/")}
        kinds = {"": ours, " in the plugin": plugin, " in all": everything}
        counts[side] = {
            f"{what}{kind}": number
            for kind, keys in kinds.items()
            for what, number in (
                ("functions", len(keys)),
                ("files", len({path for path, *_ in keys})),
            )
        }
        if options.verbose and dist.get_rank() == 0:
            for path, line, name in sorted(ours):
                print(f"{side} {path}:{line} {name}", file=sys.stderr)
    return counts


def functions_met(step: Step) -> set[Function]:
    """Return the functions that a step calls after some others."""
    for _ in range(WARMUP):
        step()
    met: set[Function] = set()
    with noted(met):
        step()
    return {key for key in met if key[0] != __file__}


@contextmanager
def noted(met: set[Function]) -> Iterator[None]:
    """Add the functions to a set that are called on this thread."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            met.add(function_of(frame.f_code))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


# --- what a step of one rank launches ---

LOW = " bf16"
"""Behind a side whose parameters are in bf16 over fp32 masters."""

OPERATORS = (BARE, *RUNS_STRATEGIES, f"zero3{LOW}", f"fsdp{LOW}", PEER, f"{PEER}{LOW}")
COPIES = ("copy", "clone", "cat")
"""Parts of the names of operators that only move values."""

STEADY = 70
"""Steps before: the first 64 forwards look for writes that leave no trace."""


class Launched(TorchDispatchMode):
    """Counts the operators that read or write values, the copies among them, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        idle = func.is_view or name == "_unsafe_view" or "empty" in name
        if idle or func.namespace == "profiler":
            return result
        self.counts["operators"] += 1
        if any(part in name for part in COPIES):
            self.counts["copies"] += 1
            met = {id(each): each for each in tree_leaves((args, kwargs, result))}
            moved = [each.nbytes for each in met.values() if isinstance(each, Tensor)]
            self.counts["bytes of copies"] += sum(moved)
        return result


def launched(step: Step) -> dict[str, int]:
    """Count what a step launches, and its calls of functions of ours, or of FSDP2."""
    homes = (
        str(Path(drivetrain.__file__).parents[2]),
        f"{Path(torch.__file__).parent}/distributed",
    )
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        path = frame.f_code.co_filename
        calls += event == "call" and path.startswith(homes) and path != __file__

    sys.setprofile(note)
    step()
    sys.setprofile(None)
    with Launched() as mode:
        step()
    return {**mode.counts, "calls of functions": calls}


def operators(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count what a steady step of one rank launches on each side."""
    found = {}
    for side in OPERATORS:
        step = training(side, options)
        for _ in range(STEADY):
            step()
        found[side] = launched(step)
    return found


# --- what a reader follows ---


def walks(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count the files and functions of ours that two walks meet on the main thread.

    The walks are ``Accelerator()`` and a backward of zero3 with the gradients it exchanges. The
    bodies of modules do not count: what was imported before, and by whom, makes no difference.
    """
    constructor: set[Function] = set()
    backward: set[Function] = set()
    torch.manual_seed(0)
    net = Net(options.blocks, options.width)
    with noted(constructor):
        accelerator = Accelerator(strategy=RUNS_STRATEGIES["zero3"], cpu=True)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    tokens = torch.randint(WORDS, (2, 4))
    for step in range(WARMUP + 1):
        loss = model(tokens).square().mean()
        with noted(backward if step == WARMUP else set()):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return {
        name: counts_of(key for key in met if key[1])
        for name, met in {"Accelerator()": constructor, "zero3 backward": backward}.items()
    }


# --- host time ---


def host(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time steps of each side, in turn: milliseconds, medians of this rank.

    ``wall`` is the clock's; ``main thread`` is the processor time of the thread that the training
    loop runs on, ``process`` that of all threads, those of collectives too.
    """
    sides = {side: training(side, options) for side in (*RUNS_STRATEGIES, PEER)}
    clocks = {
        "wall": time.perf_counter,
        "main thread": time.thread_time,
        "process": time.process_time,
    }
    series: dict[str, list[list[float]]] = {side: [] for side in sides}
    names = list(sides)
    for turn in range(WARMUP + options.steps):
        for side in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            before = [clock() for clock in clocks.values()]
            sides[side]()
            after = [clock() for clock in clocks.values()]
            series[side].append([b - a for a, b in zip(before, after, strict=True)])
    return {
        side: {
            name: 1e3 * statistics.median(times)
            for name, times in zip(clocks, zip(*rows[WARMUP:], strict=True), strict=True)
        }
        for side, rows in series.items()
    }


# --- passes over the user's model ---


def passes(_: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Count how often ``prepare()`` of megatron runs through the user's model, per model.

    The forward of the class of the root module and of the class of its blocks are wrapped before
    ``prepare()``, so copies count, and passes without values. A pass is a call of the root's
    forward, or of a block's outside of one, on the main thread; ``trials`` are calls of a block's
    on other threads, which emulate ranks to try a plan. Two ranks are ``tp``, more add ``pp``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, **words)
    llama = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        **words,
    )
    models = {"GPT-2": GPT2LMHeadModel(gpt2), "Llama": LlamaForCausalLM(llama)}
    return {name: passes_of(model) for name, model in models.items()}


def passes_of(model: nn.Module) -> dict[str, int]:
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    strategy = {"name": "megatron", "tp": 2, "pp": dist.get_world_size() // 2}
    accelerator = Accelerator(strategy=strategy, cpu=True)
    with counted(type(model), type(blocks[0])) as counts:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return dict(counts)


@contextmanager
def counted(root: type[nn.Module], block: type[nn.Module]) -> Iterator[Counter[str]]:
    """Count calls of the forwards of two classes of modules, as ``passes`` tells."""
    counts: Counter[str] = Counter(passes=0, trials=0)
    depth = 0

    def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # the signature stays: it is read for the model's arguments
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if threading.current_thread() is not threading.main_thread():
                counts["trials"] += 1
                return forward(self, *args, **kwargs)
            counts["passes"] += not depth
            depth += 1
            try:
                return forward(self, *args, **kwargs)
            finally:
                depth -= 1

        return run

    before = {kind: kind.forward for kind in (root, block)}
    for kind, forward in before.items():
        kind.forward = counting(forward)
    try:
        yield counts
    finally:
        for kind, forward in before.items():
            kind.forward = forward


# --- the command ---


def runs_main() -> None:
    """Counts and times that ``house.py`` takes on ranks: calls of a step, its host time, passes.

    ::

        torchrun --nproc-per-node 2 benchmarks/house.py runs trace
        torchrun --nproc-per-node 2 benchmarks/house.py runs host --steps 60
        torchrun --nproc-per-node 2 benchmarks/house.py runs passes
        torchrun --nproc-per-node 2 benchmarks/house.py runs walks
        torchrun --nproc-per-node 1 benchmarks/house.py runs operators --fused

    Rank 0 prints one line of JSON. Only the public interface of drivetrain is used, so that an
    older checkout can be measured by the same file.
    """
    parser = argparse.ArgumentParser(description=str(runs_main.__doc__).partition("\n")[0])
    kinds = {"trace": trace, "host": host, "passes": passes, "walks": walks}
    kinds |= {"operators": operators}
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60, help="of each side, of host")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW on every side")
    parser.add_argument("--verbose", action="store_true", help="list the functions, of trace")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = kinds[options.what](options)
    if dist.get_rank() == 0:
        root = Path(drivetrain.__file__).resolve().parents[2]
        print(json.dumps({"root": str(root), "rows": result}))
    dist.barrier()
    dist.destroy_process_group()


# --- versions ---


RANKS, TURN = 2, 5
VERSIONS_STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "fsdp",
    "megatron-tp": {"name": "megatron", "tp": 2},
    "megatron-pp": {"name": "megatron", "pp": 2, "micro_batches": 4},
    "offload": {"name": "offload", "optimizer": "cpu"},
}
THIN = ("ddp", "zero2", "zero3", "fsdp")
SIZES = {"layers": 6, "dim": 384, "heads": 6, "inner": 1024, "vocab": 4096, "seq": 64, "batch": 4}


# --- one rank of one version ---


def decoder_step(strategy: str) -> Callable[[], None]:
    from peers import Decoder, adamw, loss_of, random_batches

    from drivetrain import Accelerator

    torch.manual_seed(0)
    sizes = argparse.Namespace(**SIZES)
    accelerator = Accelerator(strategy=VERSIONS_STRATEGIES[strategy], cpu=True)
    model = Decoder(sizes)
    model, optimizer = accelerator.prepare(model, adamw(model))
    # Ranks that share one replica get the same batch.
    shares = (
        VERSIONS_STRATEGIES[strategy] if isinstance(VERSIONS_STRATEGIES[strategy], dict) else {}
    )
    together = "tp" in shares or "pp" in shares
    batches = random_batches(sizes, 0 if together else accelerator.process_index)

    def step() -> None:
        tokens = next(batches)
        if strategy == "megatron-pp":
            accelerator.pipeline_step(model, tokens[:, :-1], tokens[:, 1:], loss_fn=loss_of)
        else:
            accelerator.backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()

    return step


def thin_step(strategy: str) -> Callable[[], None]:
    from torch import nn

    from drivetrain import Accelerator

    torch.manual_seed(0)
    options: Any = {"name": strategy}
    if strategy == "zero3":
        options["keep_below"] = 0
    accelerator = Accelerator(strategy=options, cpu=True)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(24))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = torch.randn(4, 32)

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_main(model: str, strategy: str) -> None:
    """Do a turn for each line that comes; write down its seconds per step."""
    torch.set_num_threads(1)
    step = (thin_step if model == "thin" else decoder_step)(strategy)
    print("ready", flush=True)
    for line in sys.stdin:
        steps = int(line)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        print((time.perf_counter() - started) / steps, flush=True)


# --- both versions ---


class Version:
    """The ranks of one version."""

    def __init__(self, python: str, model: str, strategy: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ranks = [
            subprocess.Popen(
                [python, str(Path(__file__).resolve()), "versions", "rank", model, strategy],
                env={**os.environ, **_environment(rank, port)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._answers()

    def turn(self, steps: int) -> float:
        """Return the seconds per step of the slowest rank."""
        for rank in self._ranks:
            print(steps, file=rank.stdin, flush=True)
        return max(map(float, self._answers()))

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _answers(self) -> list[str]:
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(answers):
            self.end()
            raise SystemExit("a rank ended by itself: run its command to see why")
        return answers


def _environment(rank: int, port: int) -> dict[str, str]:
    given = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return {key: str(value) for key, value in given.items()}


def compare(pythons: tuple[str, str], model: str, strategy: str, pairs: int) -> str:
    """Return a line of the table."""
    versions = [Version(python, model, strategy) for python in pythons]
    times: list[list[float]] = [[], []]
    for index in range(pairs + 1):
        for side in (0, 1) if index % 2 else (1, 0):
            seconds = versions[side].turn(TURN)
            if index:  # the first turns warm up
                times[side].append(seconds)
    for version in versions:
        version.end()
    before, after = (1e3 * statistics.median(each) for each in times)
    low, middle, high = statistics.quantiles(
        [b / a for a, b in zip(*times, strict=True)], n=4, method="inclusive"
    )
    return (
        f"| {model} | {strategy} | {before:.2f} ms | {after:.2f} ms | "
        f"{middle:.3f} [{low:.3f} .. {high:.3f}] |"
    )


def versions_main() -> None:
    """Times a step of each strategy by two versions of drivetrain, in pairs.

    ::

        python benchmarks/house.py versions BEFORE/bin/python AFTER/bin/python
        python benchmarks/house.py versions BEFORE/bin/python AFTER/bin/python --only zero3

    Each version is installed in an environment of its own, named by its interpreter. Both train the
    same decoder on two ranks of this machine, in processes that live as long as the comparison. A
    turn is a few steps of one version while the other one waits for its next order; whoever goes
    first changes from pair to pair. Printed are medians of a turn's mean step, and the median of
    the pairs' ratios with its quartiles. ``thin`` is a model that computes next to nothing, 24
    blocks of width 32: the host's own time.
    """
    if sys.argv[1:2] == ["rank"]:
        rank_main(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=str(versions_main.__doc__).splitlines()[0])
    parser.add_argument("before", help="interpreter of the version before")
    parser.add_argument("after", help="interpreter of the version after")
    parser.add_argument("--only", nargs="*", help="strategies")
    parser.add_argument("--models", nargs="*", default=["decoder", "thin"])
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    print("| model | strategy | before | after | after / before |\n|---|---|---|---|---|")
    for model in given.models:
        for strategy in THIN if model == "thin" else VERSIONS_STRATEGIES:
            if not given.only or strategy in given.only:
                pythons = (given.before, given.after)
                print(compare(pythons, model, strategy, given.pairs), flush=True)


if __name__ == "__main__":
    run_program({"table": table_main, "runs": runs_main, "versions": versions_main})
