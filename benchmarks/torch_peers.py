"""Times FSDP and megatron beside torch's own, a step of each in turn in the same processes."""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import yaml
from peers import (
    SIZES,
    WARMUP,
    Decoder,
    LiveParameters,
    Sample,
    Step,
    adamw,
    add_sizes,
    forget_peak,
    in_turn,
    loss_of,
    random_batches,
    ranks,
    report,
    resident,
)
from programs import run_program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from torch.optim import Optimizer

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec

# --- fsdp ---


MB = 1e6


# --- the two sides ---


class Side:
    """A model in training.

    Attributes:
        model: it, prepared.
        optimizer: over its shards.
    """

    model: nn.Module
    optimizer: Optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def fill(self, tokens: Tensor) -> Tensor:
        """Give the shards new gradients; return the loss."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(tokens[:, :-1]), tokens[:, 1:])
        self.backward(loss)
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.fill(tokens)
        self.optimizer.step()
        return loss

    def held(self) -> Iterator[Tensor]:
        """Yield what the optimizer updates: this rank's shards."""
        for group in self.optimizer.param_groups:
            yield from group["params"]


class Drivetrain(Side):
    """The strategy of the options."""

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self._spec = ModelSpec.of(model)
        self._accelerator = Accelerator(strategy=options.strategy, cpu=True)
        self.model, self.optimizer = self._accelerator.prepare(model, adamw(model))

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def sent(self) -> dict[tuple[str, str], int]:
        """Return the ledger: bytes that this rank sent so far, by axis and operation."""
        return self._accelerator.traffic.sent()

    def promised(self) -> dict[tuple[str, str], int]:
        """Return the bytes that a step is to send, by axis and operation."""
        strategy = self._accelerator.strategy_of(self.model)
        return dict(type(strategy).cost(strategy.config, self._spec, strategy.run).sent)


class Torch(Side):
    """``fully_shard`` as in torchtitan; ``adamw_options`` choose the optimizer's kernel."""

    def __init__(self, model: Decoder, options: argparse.Namespace, **adamw_options: Any) -> None:
        choice = {"mesh": torch_mesh(options)}
        freed = {**choice, "reshard_after_forward": options.reshard}
        for module in (model.token, *model.blocks):
            fully_shard(module, **freed)
        fully_shard([model.norm, model.head], **choice, reshard_after_forward=False)
        fully_shard(model, **choice)
        gather_ahead([model.token, *model.blocks, model.head], options.torch_prefetch)
        self.model = model
        self.optimizer = adamw(model, **adamw_options)


def torch_mesh(options: argparse.Namespace) -> DeviceMesh:
    world = dist.get_world_size()
    if options.what != "hybrid":
        return init_device_mesh("cpu", (world,))
    shape = (world // options.shard_size, options.shard_size)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def gather_ahead(units: list[Any], count: int) -> None:
    if count == 0:
        return  # FSDP2's own order: one unit ahead in backward
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])


# --- a step, and its bytes ---


def compare_steps(model: Decoder, options: argparse.Namespace) -> None:
    ours, theirs = Drivetrain(copy.deepcopy(model), options), Torch(model, options)
    steps, batches = (ours.step, theirs.step), own_batches(options)
    in_turn(steps, batches, 0)  # only to warm up
    before = ours.sent()
    means = in_turn(steps, batches, options.pairs, warmup=0)
    grown = {key: count - before.get(key, 0) for key, count in ours.sent().items()}
    per_step = {key: count / options.pairs for key, count in grown.items() if count}
    if dist.get_rank() == 0:
        report(means)
        if options.what != "step":
            report_bytes(means, options)
            report_ledger(per_step, ours.promised(), options)


def report_bytes(means: list[list[Sample]], options: argparse.Namespace) -> None:
    print("\nsent per rank and step, as multiples of the parameters' bytes:")
    for name, samples in zip(("drivetrain", "torch"), means, strict=True):
        sent = statistics.median(sample.sent for sample in samples)
        print(f"  {name:11} {sent / options.nbytes:.4f}")
    gathers_and_sum = 3 if options.reshard else 2
    for name, multiple in formula(gathers_and_sum, options).items():
        print(f"  formula, {name}: {multiple:.4f}")


def formula(passes: int, options: argparse.Namespace) -> dict[str, float]:
    """Return what each rank must send, in multiples of the parameters."""
    world = dist.get_world_size()
    if options.what != "hybrid":
        return {"all ranks": passes * (world - 1) / world}
    shards, replicas = options.shard_size, world // options.shard_size
    return {
        "among shards": passes * (shards - 1) / shards,
        "among replicas": 2 * (replicas - 1) / replicas / shards,
    }


def report_ledger(
    sent: dict[tuple[str, str], float],
    promised: dict[tuple[str, str], int],
    options: argparse.Namespace,
) -> None:
    print("\n| axis | operation | ledger | cost() |\n" + "|---" * 4 + "|")
    for axis, operation in sorted({*sent, *promised}):
        found, theory = (part.get((axis, operation), 0) for part in (sent, promised))
        print(
            f"| {axis} | {operation} | {found / options.nbytes:.4f} | "
            f"{theory / options.nbytes:.4f} |"
        )


# --- the optimizer alone ---


def compare_optimizers(model: Decoder, options: argparse.Namespace) -> None:
    tokens = next(own_batches(options))
    sides = {
        "drivetrain": Drivetrain(copy.deepcopy(model), options),
        "FSDP2, fused": Torch(copy.deepcopy(model), options, fused=True),
        "FSDP2, foreach": Torch(model, options, foreach=True),
    }
    for side in sides.values():
        side.fill(tokens)
    ours = sides["drivetrain"]
    plain = over_plain_tensors(ours.optimizer)
    rivals = {name: side.optimizer for name, side in sides.items()}
    rivals["plain tensors again"] = over_plain_tensors(ours.optimizer)  # what chance does
    times = {name: time_pairs(rival, plain, options) for name, rival in rivals.items()}
    if dist.get_rank() == 0:
        shapes = [tensor.shape for tensor in ours.held()]
        elements = sum(shape.numel() for shape in shapes)
        print(f"{len(shapes)} tensors, {elements:,} elements")
        print("| | step | plain tensors | ratio |\n" + "|---" * 4 + "|")
        for name, pairs in times.items():
            mine, bare = (1e3 * statistics.median(series) for series in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"| {name} | {mine:.2f} ms | {bare:.2f} ms | {ratio:.3f} |")


def time_pairs(
    optimizer: Optimizer, plain: Optimizer, options: argparse.Namespace
) -> list[list[float]]:
    """Return the seconds of a step of each, means over ranks, for each pair of steps."""
    pairs = [[0.0, 0.0] for _ in range(WARMUP + options.pairs)]
    for index, pair in enumerate(pairs):
        for side in (0, 1) if index % 2 else (1, 0):  # each follows itself as often as the other
            dist.barrier()
            start = time.perf_counter()
            (optimizer, plain)[side].step()
            pair[side] = time.perf_counter() - start
    means = torch.tensor(pairs[WARMUP:], dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def over_plain_tensors(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer over copies of its tensors and gradients, each by itself."""
    groups = []
    for group in optimizer.param_groups:
        copies = []
        for tensor in group["params"]:
            copies.append(nn.Parameter(tensor.detach().clone()))
            copies[-1].grad = tensor.grad.clone()
        groups.append({**group, "params": copies})
    return torch.optim.AdamW(groups)


# --- memory ---


def measure_memory(model: Decoder, options: argparse.Namespace, before: int) -> None:
    unit_bytes = [
        sum(parameter.nbytes for module in modules for parameter in module.parameters())
        for modules in (
            [model.token],
            *([block] for block in model.blocks),
            [model.norm, model.head],
        )
    ]
    side: Side = {"drivetrain": Drivetrain, "torch": Torch}[options.side](model, options)
    batches = own_batches(options)
    for tokens in itertools.islice(batches, WARMUP):
        side.step(tokens)
    forget_peak()
    for tokens in itertools.islice(batches, options.pairs):
        side.step(tokens)
    grown = resident("VmHWM") - before
    live = LiveParameters(side.model, side.held())
    with live:
        side.step(next(batches))
    if dist.get_rank() == 0:
        two = sum(sorted(unit_bytes)[-2:])
        print(f"{options.side}: parameters, peak {live.peak / MB:.2f} MB")
        print(f"  shards {live.shards / MB:.2f} MB, the two largest units {two / MB:.2f} MB")
        print(f"  peak / (shards + two units) {live.peak / (live.shards + two):.4f}")
        print(f"  a block {max(unit_bytes[1:-1]) / MB:.2f} MB")
        print(f"resident memory grew by {grown / MB:.0f} MB, {grown / options.nbytes:.2f} x 4Ψ")


# --- the command ---


def own_batches(options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield this rank's batches: each rank has others."""
    return random_batches(options, seed=1234 + dist.get_rank())


def strategy_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the strategy's options: of --strategy, or the default, and with --reshard."""
    hybrid = {"sharding": "hybrid", "shard_size": options.shard_size}
    first, *pairs = options.strategy or ["fsdp"]
    given = yaml.safe_load(first)
    chosen = given if isinstance(given, dict) else {"name": given}
    if options.what == "hybrid" and not options.strategy:
        chosen |= hybrid
    chosen |= {key: yaml.safe_load(value) for key, _, value in (p.partition("=") for p in pairs)}
    return {"reshard_after_forward": options.reshard, **chosen}


def fsdp_options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(fsdp_main.__doc__).partition("\n")[0])
    kinds = ("step", "wire", "hybrid", "optimizer", "memory")
    parser.add_argument("--what", choices=kinds, default="step")
    parser.add_argument(
        "--strategy", nargs="+", help="a name or a YAML mapping, then key=value; default fsdp"
    )
    parser.add_argument("--reshard", choices=("true", "false"), default="true")
    parser.add_argument("--side", choices=("drivetrain", "torch"), default="drivetrain")
    parser.add_argument("--torch-prefetch", type=int, default=0, help="units ahead in FSDP2")
    parser.add_argument("--shard-size", type=int, default=2, help="ranks that share, of hybrid")
    parser.add_argument("--pairs", type=int, default=8)
    sizes = {"layers": 6, "dim": 512, "heads": 8, "inner": 1408, "vocab": 4096, "seq": 128}
    add_sizes(parser, **sizes, batch=4)
    options = parser.parse_args()
    options.reshard = options.reshard == "true"
    options.strategy = strategy_of(options)
    return options


def fsdp_main() -> None:
    """Compares sharded data parallelism with PyTorch's ``fully_shard`` (FSDP2).

    ::

        torchrun --nproc-per-node 2 benchmarks/torch_peers.py fsdp --what step
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py fsdp --what step --reshard false
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py fsdp --what wire --strategy zero3
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py fsdp --what optimizer
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py fsdp --what memory --side torch
        torchrun --nproc-per-node 4 benchmarks/torch_peers.py fsdp --what hybrid --shard-size 2

    ============= =====================================================================================
    what          printed
    ============= =====================================================================================
    ``step``      time, processor time, bytes and loss of a step, as ``peers.py`` says
    ``wire``      the same; bytes as multiples of the parameters' bytes, beside the formula; the
                  ledger's bytes by axis and operation, beside what ``cost()`` promises
    ``hybrid``    the same as ``wire``, with shards over ``--shard-size`` ranks and replicas of them
    ``optimizer`` ``optimizer.step()`` of the prepared optimizer, of the same class and options over
                  plain tensors of the same shapes, and over FSDP2's DTensors, fused and foreach; a
                  second set of plain tensors shows how far equal things come out apart
    ``memory``    of one ``--side``: the most bytes of parameters that are alive in a step, counted at
                  every operator; the growth of resident memory at its peak
    ============= =====================================================================================

    FSDP2 is applied as torchtitan does: to the embedding, to each block, to norm and head together
    (not resharded after forward, as backward needs them next), then to the root. ``--torch-prefetch
    1`` gathers units ahead there explicitly; over gloo that made no difference, as its gathers are
    waited for where they are started, and asynchronous ones (``_set_unshard_async_op``) made none
    either.

    The sizes given by default are 23 million parameters; 110 million are
    ``--layers 12 --dim 768 --heads 12 --inner 2048 --vocab 16384 --batch 2``.
    """  # noqa: E501 -- a table
    options = fsdp_options_of()
    with ranks():
        before = resident("VmRSS")
        model = Decoder(options)
        options.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        if dist.get_rank() == 0:
            millions = options.nbytes / 4e6
            print(
                f"{options.what}, {millions:.0f} million parameters, {options.strategy}", flush=True
            )
        if options.what == "optimizer":
            compare_optimizers(model, options)
        elif options.what == "memory":
            measure_memory(model, options, before)
        else:
            compare_steps(model, options)


# --- megatron ---


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


def megatron_options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(megatron_main.__doc__).partition("\n")[0])
    parser.add_argument("--what", choices=("tp", "sp", "pp"), required=True)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--cut", default="7,5", help="blocks of each stage")
    parser.add_argument("--schedule", default="1f1b", help="ours; PyTorch's is 1f1b")
    add_sizes(parser, **SIZES, batch=4, micro_batches=4)
    return parser.parse_args()


def megatron_main() -> None:
    """Times a step of tensor or pipeline parallelism against PyTorch's own, in the same processes.

    ::

        torchrun --nproc-per-node 2 benchmarks/torch_peers.py megatron --what tp
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py megatron --what sp
        torchrun --nproc-per-node 2 benchmarks/torch_peers.py megatron --what pp
        drivetrain launch --cpu --nproc-per-node 2 benchmarks/torch_peers.py megatron --what pp

    ====== ================================== ====================================================
    what   drivetrain                         PyTorch
    ====== ================================== ====================================================
    ``tp`` megatron, tp over all ranks        ``parallelize_module``: columns and rows, embedding and
                                              loss divided by words, one entrance for q, k and v
    ``sp`` the same with sequence_parallel    the same with ``SequenceParallel``, as torchtitan has it
    ``pp`` megatron, pp over all ranks, 1f1b  ``Schedule1F1B`` over stages made by hand, equally cut
    ====== ================================== ====================================================

    Both sides train in the same processes, a step of each in turn; ``peers.py`` says what is
    measured.
    """  # noqa: E501 -- a table
    options = megatron_options_of()
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
    run_program({"fsdp": fsdp_main, "megatron": megatron_main})
