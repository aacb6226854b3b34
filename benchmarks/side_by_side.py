"""Times a step of data parallelism beside its peers: libraries, and torch's DDP in pairs."""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import run_program
from torch import Tensor, nn

from drivetrain.config import LaunchConfig
from drivetrain_launch.ranks.placement import heap_variables

# --- libraries ---


Step = Callable[[Tensor], Tensor]
AT_END: list[Callable[[], object]] = []
MODELS = {
    "small": SimpleNamespace(layers=6, dim=512, heads=8, seq=128, vocab=4096, batch=4),
    "large": SimpleNamespace(layers=12, dim=768, heads=12, seq=128, vocab=16384, batch=2),
}
"""23 million and 110 million parameters."""


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def torch_ddp_fused(model: nn.Module) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain(wrapped, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))


def with_accelerator(accelerator: Any, model: nn.Module) -> Step:
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    AT_END.append(accelerator.free_memory)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(prepared, tokens)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return step


def drivetrain(strategy: str) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        from drivetrain import Accelerator

        return with_accelerator(Accelerator(strategy=strategy, cpu=True), model)

    return make


def accelerate(model: nn.Module) -> Step:
    from accelerate import Accelerator

    return with_accelerator(Accelerator(cpu=True), model)


def torch_ddp(model: nn.Module) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain(wrapped, adamw(model))


def torch_zero1(model: nn.Module) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=3e-4
    )
    return plain(wrapped, optimizer)


def torch_fsdp2(model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, adamw(model))


def deepspeed(stage: int) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed as ds

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
        }
        engine, *_ = ds.initialize(
            model=model, optimizer=adamw(model), config=config, dist_init_required=False
        )

        def step(tokens: Tensor) -> Tensor:
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            return loss

        return step

    return make


DRIVETRAIN = ("ddp", "zero1", "zero2", "zero3", "fsdp")
OURS = ["drivetrain_launch", "launch", "--cpu"]
THEIRS = ["torch.distributed.run", "--standalone"]
ROWS: dict[str, Callable[[nn.Module], Step]] = {
    **{name: drivetrain(name) for name in DRIVETRAIN},
    "torch_ddp": torch_ddp,
    "torch_ddp_fused": torch_ddp_fused,
    "accelerate": accelerate,
    "torch_zero1": torch_zero1,
    "torch_fsdp2": torch_fsdp2,
    "deepspeed_z1": deepspeed(1),
    "deepspeed_z2": deepspeed(2),
    "deepspeed_z3": deepspeed(3),
}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def libraries_work(name: str, steps: int, shape: SimpleNamespace) -> None:
    """Train in this process, one of several; rank 0 prints the result as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    before = resident()
    model = Gpt(shape)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    step = ROWS[name](model)
    generator = torch.Generator().manual_seed(1234 + rank)
    batch = (shape.batch, shape.seq + 1)
    pool = [torch.randint(shape.vocab, batch, generator=generator) for _ in range(4)]
    times = []
    for i in range(3 + steps):
        if i == 3:
            dist.barrier()
            sent = sent_bytes()
            busy = time.process_time()
        start = time.perf_counter()
        loss = step(pool[i % 4])
        times.append(time.perf_counter() - start)
    busy = (time.process_time() - busy) / steps
    dist.barrier()
    sent = (sent_bytes() - sent) / steps / size
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rank == 0:
        result = {
            "seconds": statistics.median(times[3:]),
            "busy": busy,
            "loss": float(mean) / size,
            "wire": sent / parameters,
            "memory": (peak - before) / parameters,
        }
        print("RESULT " + json.dumps(result), flush=True)
    for action in AT_END:
        action()
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, options: argparse.Namespace) -> dict[str, float]:
    launcher = OURS if name in DRIVETRAIN else THEIRS
    command = [sys.executable, "-m", *launcher, f"--nproc-per-node={options.ranks}", __file__]
    command += [
        "libraries",
        name,
        "--worker",
        f"--steps={options.steps}",
        f"--model={options.model}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options.keep_memory:
        environment |= heap_variables(LaunchConfig(), accelerators=0)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"{name} failed:\n{done.stderr[:4000]}")


def libraries_main() -> None:
    """Trains one model under drivetrain and its peers in turn, and prints a table.

    ::

        python benchmarks/side_by_side.py libraries  # all of them
        python benchmarks/side_by_side.py libraries ddp torch_ddp --rounds 5
        python benchmarks/side_by_side.py libraries zero3 torch_fsdp2 --against torch_fsdp2

    Needs an environment with drivetrain, accelerate and deepspeed. Each row is a run of its own on
    ``--ranks`` CPU processes over gloo, with one thread each, drivetrain's under ``drivetrain
    launch`` and the peers' under ``torchrun``; ``--keep-memory`` gives the peers' processes the two
    variables of the C library that ``drivetrain launch`` sets. The rounds go through all rows in
    turn, so what else the machine does hits all of them. Per row: the median over rounds of the
    median step time, its ratio to ``--against`` in the same round, the processor time of a step
    (all threads of a rank; steadier than the clock when other work disturbs), the loss after the
    last step, the bytes that the loopback interface sent per rank and step as a multiple of the
    parameters' bytes, and the growth of resident memory at its peak.
    """
    parser = argparse.ArgumentParser(description=str(libraries_main.__doc__).partition("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--against", choices=ROWS, default="torch_ddp")
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        libraries_work(options.rows[0], options.steps, MODELS[options.model])
        return
    rows = options.rows or list(ROWS)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name in rows:
            results[name].append(run(name, options))
    print(f"| | step | x {options.against} | processor | loss | sent, x 4Ψ | peak memory, x 4Ψ |")
    print("|---" * 7 + "|")
    for name, found in results.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        ratio = "-"
        if options.against in results:
            pairs = zip(found, results[options.against], strict=True)
            ratio = f"{statistics.median(a['seconds'] / b['seconds'] for a, b in pairs):.3f}"
        print(
            f"| {name} | {1e3 * middle['seconds']:.0f} ms | {ratio} | "
            f"{1e3 * middle['busy']:.0f} ms | {middle['loss']:.5f} | "
            f"{middle['wire']:.3f} | {middle['memory']:.2f} |"
        )


# --- ddp ---


WARMUP = 3


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time_, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A small decoder; the head is not tied, so that it is as large as the embedding."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.dim
        self.token = nn.Embedding(options.vocab, width)
        self.position = nn.Embedding(options.seq, width)
        self.blocks = nn.ModuleList(Block(width, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, options.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt(options)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def with_torch(options: argparse.Namespace) -> Step:
    model, optimizer = build(options)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def with_accelerate(options: argparse.Namespace) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(*build(options))

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapped, tokens)
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return step


def with_drivetrain(options: argparse.Namespace) -> Step:
    from drivetrain.cost import Traffic
    from drivetrain.runtime.mesh import Mesh
    from drivetrain.runtime.precision import Precision
    from drivetrain.runtime.world import World
    from drivetrain.strategy import Run
    from drivetrain_ddp.options import DdpConfig
    from drivetrain_ddp.strategy import Ddp

    world = World.discover(cpu=True)
    config = DdpConfig(**json.loads(options.config))
    run = Run(
        world=world,
        mesh=Mesh.build(Ddp.axes(config, world.size), world),
        precision=Precision.of("no"),
        accumulation=1,
        traffic=Traffic(),
    )
    strategy = Ddp(config, run)
    model, optimizer = build(options)
    strategy.prepare(model, [optimizer])

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        strategy.backward(loss)
        optimizer.step()
        return loss

    return step


IMPLEMENTATIONS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "drivetrain": with_drivetrain,
    "torch": with_torch,
    "accelerate": with_accelerate,
}


def sent_bytes() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("no loopback interface in /proc/net/dev")


def batches(options: argparse.Namespace) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1234 + dist.get_rank())
    pool = [
        torch.randint(options.vocab, (options.batch, options.seq + 1), generator=generator)
        for _ in range(4)
    ]
    while True:
        yield from pool


def measure(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run a step of each implementation in turn; return times (s), losses and wire bytes."""
    steps = {name: IMPLEMENTATIONS[name](options) for name in names}
    results = {name: {"times": [], "cpu": [], "wire": 0, "loss": 0.0} for name in names}
    stream = batches(options)
    for index in range(WARMUP + options.steps):
        tokens = next(stream)
        # Each goes first as often as the other.
        for name in names if index % 2 else reversed(names):
            dist.barrier()
            before, start, busy = sent_bytes(), time.perf_counter(), time.process_time()
            loss = steps[name](tokens)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            dist.barrier()
            if index >= WARMUP:
                results[name]["times"].append(seconds)
                results[name]["cpu"].append(busy)
                results[name]["wire"] += sent_bytes() - before
            results[name]["loss"] = loss.item()
    return results


def ddp_work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = measure(options.names, options)
    ranks = dist.get_world_size()
    with torch.device("meta"):
        nbytes = sum(parameter.nbytes for parameter in Gpt(options).parameters())
    ideal = 2 * (ranks - 1) / ranks * nbytes
    for result in results.values():
        result["wire"] /= options.steps * ranks * ideal
    if dist.get_rank() == 0:
        Path(options.output).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def launch(names: list[str], arguments: list[str], options: argparse.Namespace) -> dict:
    """Run a worker per rank and return rank 0's results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = Path(f"/tmp/ddp_step_{os.getpid()}.json")
    command = [
        sys.executable,
        __file__,
        "ddp",
        *arguments,
        "--names",
        *names,
        "--output",
        str(output),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(options.ranks),
        "LOCAL_WORLD_SIZE": str(options.ranks),
    }
    workers = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit("a worker failed")
    results = json.loads(output.read_text(encoding="utf-8"))
    output.unlink()
    return results


def report(title: str, rival: str, ratios: list[float], runs: list[dict]) -> None:
    def median(name: str, what: str) -> float:
        return 1e3 * statistics.median(t for run in runs if name in run for t in run[name][what])

    def wire(name: str) -> float:
        return statistics.median(run[name]["wire"] for run in runs if name in run)

    columns = [
        f"{name:10s} {median(name, 'times'):7.1f} ms, cpu {median(name, 'cpu'):7.1f} ms, "
        f"wire {wire(name):.4f}"
        for name in ("drivetrain", rival)
    ]
    print(
        f"{title:9s}  {'   '.join(columns)}   time ratio {statistics.median(ratios):.3f} "
        f"[{min(ratios):.3f} .. {max(ratios):.3f}]",
        flush=True,
    )


def compare(rival: str, arguments: list[str], options: argparse.Namespace) -> None:
    if options.method in ("alternate", "both"):
        run = launch(["drivetrain", rival], arguments, options)
        ours, theirs = run["drivetrain"]["times"], run[rival]["times"]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        report("alternate", rival, ratios, [run])
    if options.method in ("pairs", "both"):
        ratios, runs = [], []
        for _ in range(options.pairs):
            pair = {**launch(["drivetrain"], arguments, options)}
            pair |= launch([rival], arguments, options)
            runs.append(pair)
            ratios.append(
                statistics.median(pair["drivetrain"]["times"])
                / statistics.median(pair[rival]["times"])
            )
        report("pairs", rival, ratios, runs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(ddp_main.__doc__).partition("\n")[0])
    parser.add_argument("--method", choices=("alternate", "pairs", "both"), default="both")
    parser.add_argument("--rivals", nargs="+", default=["torch"])
    parser.add_argument("--config", default="{}", help="options of our strategy, as JSON")
    parser.add_argument("--names", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    sizes = {"pairs": 5, "ranks": 2, "steps": 20, "layers": 6, "dim": 512, "heads": 8}
    for name, value in {**sizes, "seq": 128, "vocab": 4096, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def ddp_main() -> None:
    """Times a training step of our data parallelism against torch's and Accelerate's, on the CPU.

    ::

        python benchmarks/side_by_side.py ddp  # both methods, ratios to torch
        python benchmarks/side_by_side.py ddp --method alternate --rivals torch
        python benchmarks/side_by_side.py ddp --method pairs --pairs 5 --rivals torch accelerate

    ``alternate`` trains two implementations in the same processes, a step of each in turn, and
    reports the median of the ratios of neighbouring steps: what else the machine does hits both.
    ``pairs`` runs whole trainings, in new processes, in turn. Both report the bytes that the
    loopback interface sent per rank and step as a multiple of 2 (N-1)/N x the bytes of the
    parameters. Accelerate must be installed for its row (the other rivals need nothing but torch);
    its module may live in another environment: run this file with that environment's python and
    PYTHONPATH=src:plugins.
    """
    chosen = parse()
    if chosen.names:
        ddp_work(chosen)
    else:
        for rival in chosen.rivals:
            compare(rival, sys.argv[1:], chosen)


if __name__ == "__main__":
    run_program({"libraries": libraries_main, "ddp": ddp_main})
