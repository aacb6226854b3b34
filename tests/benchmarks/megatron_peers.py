"""Times a step of tensor or pipeline parallelism against PyTorch's own, in the same processes.

::

    torchrun --nproc-per-node 2 tests/benchmarks/megatron_peers.py --what tp
    torchrun --nproc-per-node 2 tests/benchmarks/megatron_peers.py --what sp
    torchrun --nproc-per-node 2 tests/benchmarks/megatron_peers.py --what pp
    drivetrain launch --cpu --nproc-per-node 2 tests/benchmarks/megatron_peers.py -- --what pp

====== ================================== ====================================================
what   drivetrain                         PyTorch
====== ================================== ====================================================
``tp`` megatron, tp over all ranks        ``parallelize_module``: columns and rows, embedding and
                                          loss divided by words, one entrance for q, k and v
``sp`` the same with sequence_parallel    the same with ``SequenceParallel``, as torchtitan has it
``pp`` megatron, pp over all ranks, 1f1b  ``Schedule1F1B`` over stages made by hand, equally cut
====== ================================== ====================================================

Two copies of one decoder with equal weights train on the same batches, a step of each in turn, so
what else the machine does hits both. Per side: the median of a step's time, from a barrier to a
barrier; the processor time of a rank, all threads; the bytes that a rank wrote to its connections
(``wchar`` of ``/proc/self/io``; gloo writes with system calls that count there); the loss after the
last step. The ratio is the median over neighboring steps.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from drivetrain import Accelerator

Step = Callable[[Tensor], Tensor]
WARMUP = 2


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, head: int, length: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        turns = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, head, 2) / head)
        self.register_buffer("cos", turns.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", turns.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, self.head).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return x * cos + torch.cat((-second, first), -1) * sin


class Mlp(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.dim
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, width // options.heads, options.seq)
        self.mlp = Mlp(width, options.inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Blocks between an embedding and a head; without the two, a stage of a pipeline."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocab, options.dim)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.dim)
        self.head = nn.Linear(options.dim, options.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.token is None else self.token(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    kinds = [[], []]  # the fused step takes no group of plain and distributed tensors
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=3e-4, fused=True)


# --- ours ---


def our_tensor(model: nn.Module, options: argparse.Namespace) -> Step:
    strategy = {"name": "megatron", "tp": dist.get_world_size()}
    strategy["sequence_parallel"] = options.what == "sp"
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def our_pipeline(model: nn.Module, options: argparse.Namespace) -> Step:
    strategy = {"name": "megatron", "pp": dist.get_world_size(), "cut": options.cut}
    strategy |= {"schedule": options.schedule, "micro_batches": options.micro_batches}
    accelerator = Accelerator(strategy=strategy, cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        batch, targets = (tokens[:, :-1],), tokens[:, 1:]
        loss = accelerator.pipeline_step(model, batch, targets, loss_fn=loss_of)
        optimizer.step()
        return loss

    return step


# --- PyTorch's ---


def torch_tensor(model: nn.Module, options: argparse.Namespace) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outside = Shard(1) if options.what == "sp" else Replicate()
    entrance = PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),))
    norm = {"norm": SequenceParallel()} if options.what == "sp" else {}
    edges = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(
            input_layouts=outside, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, {**edges, **norm})
    for block in model.blocks:
        columns = {
            name: ColwiseParallel()
            for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        }
        rows = {
            name: RowwiseParallel(output_layouts=outside) for name in ("attention.o", "mlp.down")
        }
        norms = {name + suffix: norm["norm"] for name in norm for suffix in ("_1", "_2")}
        entrances = {"attention": entrance, "mlp": entrance}
        parallelize_module(block, mesh, {**norms, **entrances, **columns, **rows})
    optimizer = adamw(model)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
        optimizer.step()
        return loss.detach().full_tensor()

    return step


def torch_pipeline(model: nn.Module, options: argparse.Namespace) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [int(count) for count in options.cut.split(",")]
    start = sum(counts[:rank])
    model.blocks = model.blocks[start : start + counts[rank]]
    if rank > 0:
        model.token = None
    if rank < size - 1:
        model.norm = model.head = None
    optimizer = adamw(model)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss_of)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == size - 1:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(mean, size - 1)
        return mean

    return step


# --- measuring ---


class Sample(NamedTuple):
    """One step: seconds by the clock, seconds of the processor, bytes written, loss."""

    seconds: float
    busy: float
    sent: int
    loss: float


def written() -> int:
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("no wchar in /proc/self/io")


def measured(step: Step, tokens: Tensor) -> Sample:
    dist.barrier()
    sent, start, busy = written(), time.perf_counter(), time.process_time()
    loss = step(tokens)
    dist.barrier()
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return Sample(seconds, busy, written() - sent, loss.item())


def over_ranks(sides: list[list[Sample]]) -> list[list[Sample]]:
    """Return the samples with the means over ranks in place of this rank's."""
    values = torch.tensor(sides, dtype=torch.float64)
    dist.all_reduce(values)
    values /= dist.get_world_size()
    return [[Sample(*sample) for sample in side] for side in values.tolist()]


def report(names: list[str], sides: list[list[Sample]]) -> None:
    print("| | step | processor | sent per rank | loss |\n" + "|---" * 5 + "|")
    for name, samples in zip(names, sides, strict=True):
        middle = [statistics.median(values) for values in zip(*samples, strict=True)]
        print(
            f"| {name} | {1e3 * middle[0]:.0f} ms | {1e3 * middle[1]:.0f} ms | "
            f"{middle[2] / 1e6:.2f} MB | {samples[-1].loss:.6f} |"
        )
    for what in ("seconds", "busy"):
        ratios = [getattr(a, what) / getattr(b, what) for a, b in zip(*sides, strict=True)]
        print(
            f"{what}: drivetrain / torch {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f} .. {max(ratios):.3f}] over {len(ratios)} pairs"
        )


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=("tp", "sp", "pp"), required=True)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--cut", default="7,5", help="blocks of each stage")
    parser.add_argument("--schedule", default="1f1b", help="ours; PyTorch's is 1f1b")
    sizes = {"layers": 12, "dim": 768, "heads": 12, "inner": 2048, "vocab": 16384}
    for name, value in {**sizes, "seq": 128, "batch": 4, "micro_batches": 4}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Decoder(options)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    pipeline = options.what == "pp"
    makers = (our_pipeline, torch_pipeline) if pipeline else (our_tensor, torch_tensor)
    steps = [make(copy.deepcopy(model), options) for make in makers]
    del model
    generator = torch.Generator().manual_seed(1234)
    samples: list[list[Sample]] = [[], []]
    for index in range(WARMUP + options.pairs):
        tokens = torch.randint(options.vocab, (options.batch, options.seq + 1), generator=generator)
        for side in (0, 1) if index % 2 else (1, 0):  # each goes first as often as the other
            samples[side].append(measured(steps[side], tokens))
    means = over_ranks([side[WARMUP:] for side in samples])
    if dist.get_rank() == 0:
        print(f"{options.what}, {millions:.0f} million parameters", flush=True)
        report(["drivetrain", "torch"], means)
        apart = max(abs(a.loss - b.loss) for a, b in zip(*means, strict=True))
        print(f"losses at most {apart:.1e} apart")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
