"""Trains one model under drivetrain and its peers in turn, and prints a table.

::

    python benchmarks/side_by_side.py                      # all of them
    python benchmarks/side_by_side.py ddp torch_ddp --rounds 5
    python benchmarks/side_by_side.py zero3 torch_fsdp2 --model large --against torch_fsdp2

Needs an environment with drivetrain, accelerate and deepspeed. Each row is a run of its own on
``--ranks`` CPU processes over gloo, with one thread each, drivetrain's under ``drivetrain launch``
and the peers' under ``torchrun``; ``--keep-memory`` gives the peers' processes the two variables
of the C library that ``drivetrain launch`` sets. The rounds go through all rows in turn, so what
else the machine does hits all of them. Per row: the median over rounds of the median step
time, its ratio to ``--against`` in the same round, the processor time of a step (all threads of a
rank; steadier than the clock when other work disturbs), the loss after the last step, the bytes
that the loopback interface sent per rank and step as a multiple of the parameters' bytes, and the
growth of resident memory at its peak.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import Gpt, loss_of, sent_bytes
from torch import Tensor, nn

from drivetrain.config import LaunchConfig
from drivetrain_launch.ranks.placement import heap_variables

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


def work(name: str, steps: int, shape: SimpleNamespace) -> None:
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
    command = [sys.executable, "-m", *launcher, f"--nproc-per-node={options.ranks}", __file__, name]
    command += ["--worker", f"--steps={options.steps}", f"--model={options.model}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options.keep_memory:
        environment |= heap_variables(LaunchConfig(), accelerators=0)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"{name} failed:\n{done.stderr[:4000]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
        work(options.rows[0], options.steps, MODELS[options.model])
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


if __name__ == "__main__":
    main()
