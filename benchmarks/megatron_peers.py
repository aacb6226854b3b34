"""Times a step of tensor or pipeline parallelism against PyTorch's own, in the same processes.

::

    torchrun --nproc-per-node 2 benchmarks/megatron_peers.py --what tp
    torchrun --nproc-per-node 2 benchmarks/megatron_peers.py --what sp
    torchrun --nproc-per-node 2 benchmarks/megatron_peers.py --what pp
    drivetrain launch --cpu --nproc-per-node 2 benchmarks/megatron_peers.py --what pp

====== ================================== ====================================================
what   drivetrain                         PyTorch
====== ================================== ====================================================
``tp`` megatron, tp over all ranks        ``parallelize_module``: columns and rows, embedding and
                                          loss divided by words, one entrance for q, k and v
``sp`` the same with sequence_parallel    the same with ``SequenceParallel``, as torchtitan has it
``pp`` megatron, pp over all ranks, 1f1b  ``Schedule1F1B`` over stages made by hand, equally cut
====== ================================== ====================================================

Both sides train in the same processes, a step of each in turn; ``peers.py`` says what is measured.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from peers import (
    SIZES,
    Decoder,
    Step,
    adamw,
    add_sizes,
    in_turn,
    loss_of,
    random_batches,
    ranks,
    report,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from drivetrain import Accelerator

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


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=("tp", "sp", "pp"), required=True)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--cut", default="7,5", help="blocks of each stage")
    parser.add_argument("--schedule", default="1f1b", help="ours; PyTorch's is 1f1b")
    add_sizes(parser, **SIZES, batch=4, micro_batches=4)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    with ranks():
        model = Decoder(options)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        pipeline = options.what == "pp"
        makers = (our_pipeline, torch_pipeline) if pipeline else (our_tensor, torch_tensor)
        steps = [make(copy.deepcopy(model), options) for make in makers]
        del model
        means = in_turn(steps, random_batches(options, seed=1234), options.pairs)
        if dist.get_rank() == 0:
            print(f"{options.what}, {millions:.0f} million parameters", flush=True)
            report(means)


if __name__ == "__main__":
    main()
