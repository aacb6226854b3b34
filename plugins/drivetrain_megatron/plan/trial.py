"""Tries a plan before its use: ranks that are threads must reproduce the whole block's numbers.

The parts of the computation that a plan gets wrong (heads that mix, a norm over features that are
spread over ranks, a size counted from the whole) show as a wrong number, not as an error. So
outputs, gradients of inputs and gradients of parameters are compared with those of the whole block,
at random values. The comparison also tells which parameters, though whole, get a part of their
gradient on each rank.

A second trial, in training mode with every dropout left out, compares the inputs of dropouts: each
is the same on all ranks, a shard of the sequence, or the share of some layer's heads or features.

Ranks as threads of one process, to try a division of a model before any rank is started.

Each thread runs the code of one rank, forward and backward: autograd runs backward on the CPU in
the calling thread. A collective is a meeting of all threads. Between meetings one thread runs at a
time, with random generators of its own, which all begin in the same state: what ranks draw is
alike, as when they are processes.
"""

import copy
import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.collectives import Communicator, Handle, Reduction
from drivetrain.collectives.communicator import Finished, Request, flatten
from drivetrain.collectives.volume import Chunks, checked_chunks
from drivetrain.cost import Traffic
from drivetrain.errors import CollectiveError, ConfigError
from drivetrain.log import get_logger
from drivetrain.runtime import rng
from drivetrain.runtime.mesh import Axis
from drivetrain_megatron.dropout import DropoutLayout, DropoutRecorder, Site, open_attentions
from drivetrain_megatron.plan.divide import BlockPlan, divide
from drivetrain_megatron.recording.calls import Call
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.tensor.linear import is_linear, is_transposed
from drivetrain_megatron.tensor.operators import Edges, TokenShards, Uncopied, gather, scatter
from drivetrain_megatron.tensor.partition import Partition, ShardingSpec, even

# --- ranks as threads of one process ---

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy of the data that one rank brings to a collective: 1-D, only read."""

    call: Request
    where: str
    flat: Tensor

    @property
    def facts(self) -> tuple[Request, int, torch.dtype]:
        """What ranks must do alike."""
        return self.call._replace(label=""), self.flat.numel(), self.flat.dtype

    def __str__(self) -> str:
        return f"{self.call.operation} of {self.flat.numel()} {self.flat.dtype} ({self.where})"


class Meeting:
    """Where the threads of all ranks see each other's data.

    One thread at a time has the right to run, with its own random generators: between two meetings
    each has one turn, in the order of ranks, so that of several failures the same one comes first.
    Who has its turn again knows whether all others have come, or will not come any more.
    """

    def __init__(self, size: int) -> None:
        self._turns = threading.Condition()
        self._order = list(range(size))
        self._first = rng.Snapshot()
        self._states = [self._first] * size
        self._offers: dict[int, Offer] = {}
        self._met: list[Offer] = []

    def exchange(
        self, rank: int, offer: Offer, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        """Return this rank's function of the data of all ranks, as they were offered.

        Raises:
            CollectiveError: a rank does something else, does not come, or has failed.
        """
        self._offers[rank] = offer
        if len(self._offers) == len(self._states):  # the last one; the next meeting may begin
            self._met, self._offers = [each for _, each in sorted(self._offers.items())], {}
        self.leave(rank, returns=True)
        self.take(rank)
        if rank in self._offers:
            raise CollectiveError(
                f"rank {rank} waited for the others in {offer}, but one of them has failed or ended"
            )
        if any(offer.facts != each.facts for each in self._met):
            found = "; ".join(f"rank {r}: {each}" for r, each in enumerate(self._met))
            raise CollectiveError(
                f"ranks must run the same operations in the same order, found {found}; they took "
                "different paths through the model"
            )
        return combine([each.flat for each in self._met])

    def take(self, rank: int) -> None:
        """Wait for this rank's turn."""
        with self._turns:
            self._turns.wait_for(lambda: self._order[0] == rank)
        self._states[rank].put_back()

    def leave(self, rank: int, *, returns: bool = False) -> None:
        """Let the next rank run."""
        self._states[rank] = rng.Snapshot()
        with self._turns:
            self._order = [*self._order[1:], *[rank] * returns]
            self._turns.notify_all()

    def end(self) -> None:
        """Give the generators the state that they had before."""
        self._first.put_back()


class EmulatedCommunicator(Communicator):
    """Collectives among threads; every operation is over when it is submitted.

    The ledger gets the bytes that the ring algorithm sends.
    """

    def __init__(self, axis: Axis, traffic: Traffic, meeting: Meeting) -> None:
        super().__init__(axis, traffic, timedelta())  # nobody waits in vain
        self._meeting = meeting

    def all_reduce(
        self, tensor: Tensor, *, scale: float = 1.0, reduction: Reduction = "sum", label: str = ""
    ) -> Handle:
        """Replace a contiguous tensor of any shape by the reduction over ranks, times scale."""
        combine = functools.partial(_reduced, reduction=reduction, scale=scale)
        return self._run(
            Request("all_reduce", label, reduction=reduction), flatten(tensor), combine
        )

    def reduce_scatter(
        self, flat: Tensor, *, scale: float = 1.0, chunks: Chunks | None = None, label: str = ""
    ) -> Handle:
        """Put the sum over ranks, times scale, into this rank's chunk; the others stay."""
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        start, stop = bounds[self.rank]
        return self._run(
            Request("reduce_scatter", label, bounds),
            flatten(flat, (flat.numel(),)),
            lambda flats: _reduced([each[start:stop] for each in flats], "sum", scale),
            bounds[self.rank],
        )

    def all_gather(self, flat: Tensor, *, chunks: Chunks | None = None, label: str = "") -> Handle:
        """Fill a flat tensor from the chunks of all ranks."""
        bounds = checked_chunks(chunks, flat.numel(), self.size)
        return self._run(
            Request("all_gather", label, bounds),
            flatten(flat, (flat.numel(),)),
            lambda flats: torch.cat([f[a:b] for f, (a, b) in zip(flats, bounds, strict=True)]),
        )

    def broadcast(self, tensor: Tensor, source: int = 0, *, label: str = "") -> Handle:
        """Copy a contiguous tensor from the rank with index ``source``."""
        call = Request("broadcast", label, source=source)
        return self._run(call, flatten(tensor), lambda flats: flats[source].clone())

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._run(Request("barrier", "barrier"), torch.zeros(self.size), lambda flats: flats[0])

    def close(self) -> None:
        """Nothing to release."""

    def _run(
        self,
        call: Request,
        flat: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        part: tuple[int, int] | None = None,
    ) -> Handle:
        if header := self._header(call, flat):
            start, stop = part or (0, flat.numel())
            # A rank that goes on may write into its tensor before another has read it.
            offer = Offer(call, header.label, flat.clone())
            with torch.no_grad():
                flat[start:stop] = self._meeting.exchange(self.rank, offer, combine)
        return Finished()


def run_emulated(size: int, function: Callable[[Communicator], Result]) -> list[Result]:
    """Run a function as each of several ranks, one thread per rank, and return the results by rank.

    The function gets the rank's communicator, on an axis named ``tp``. Grad mode and the state of
    random generators are the caller's, who gets the generators back as they were.

    Raises:
        Exception: the first exception that a rank raised; the other ranks are stopped at their next
            collective.
    """
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    grad = torch.is_grad_enabled()

    def body(rank: int) -> None:
        axis = Axis(
            name="tp", size=size, rank=rank, ranks=tuple(range(size)), hosts=("here",) * size
        )
        communicator = EmulatedCommunicator(axis, Traffic(), meeting)
        meeting.take(rank)
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = function(communicator)
        except BaseException as error:  # ends the thread, not the process
            failures.append(error)
        finally:
            meeting.leave(rank)

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"emulated rank {rank}")
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    meeting.end()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


def _reduced(flats: list[Tensor], reduction: Reduction, scale: float) -> Tensor:
    """Return the reduction, in the order of ranks, so that all get the same bits."""
    combine = torch.add if reduction == "sum" else torch.maximum
    total = functools.reduce(combine, flats[1:], flats[0].clone())
    return total.mul_(scale) if scale != 1.0 else total


# --- copies for trials: random values, and thin matrices where the model's are large ---

# A division decides about one dim of a matrix: a layer cut by columns keeps all of its input, one
# cut by rows all of its output, an embedding all features of a word. In that other dim a trial
# needs no thousands of features. So a large matrix becomes thin there, and a fixed random matrix
# stands before or behind the layer: activations keep their shapes, and the code of the model does
# not notice. The trial of a block with 200 M parameters then takes megabytes.


FEATURES = 16
"""Of a thin matrix. More make a trial slower; with fewer, an error could hide in the others."""

LARGE = 1 << 16
"""Elements of a matrix that becomes thin. Smaller ones are tried as they are."""


class _Thin(NamedTuple):
    """A layer with a thin matrix.

    Attributes:
        module: its name.
        parameters: the names of its parameters, each with the dim that becomes thin.
        before: features of the input that become fewer; 0 if the output's do.
        behind: features of the output, likewise.
    """

    module: str
    parameters: Mapping[str, int]
    before: int = 0
    behind: int = 0


def random_copy(
    model: nn.Module,
    generator: torch.Generator,
    rows: Collection[str] | None,
    dtype: torch.dtype,
) -> nn.Module:
    """Return a copy on the CPU in evaluation mode, with random values.

    Args:
        model: its values do not matter; it may be on the meta device.
        generator: of the values.
        rows: names of the layers that may be cut by rows; None leaves all matrices as they are.
        dtype: of the values.
    """
    layers = _thin_layers(model, rows)
    shapes = _shapes(model, layers)
    known: dict[int, Any] = {}
    for _, parameter in model.named_parameters():
        # Also what is frozen now: it may be trained later.
        values = _values(parameter, shapes[id(parameter)], generator)
        known[id(parameter)] = nn.Parameter(values, parameter.is_floating_point())
    for buffer in model.buffers():
        if buffer.is_meta:
            known[id(buffer)] = _values(buffer, buffer.shape, generator)
    copied = copy_of(model, known).to("cpu", dtype).eval()
    before: dict[int, _Narrow] = {}
    for layer in layers:
        module = copied.get_submodule(layer.module)
        if layer.before:
            size = layer.before
            matrix = randn((size, FEATURES), generator).to(dtype) * size**-0.5
            before.setdefault(size, _Narrow(matrix))
            module.register_forward_pre_hook(before[size])
        else:
            size = layer.behind
            matrix = randn((FEATURES, size), generator).to(dtype) * FEATURES**-0.5
            module.register_forward_hook(_Widen(matrix))
            if is_transposed(module):
                vars(module)["nf"] = FEATURES
    return copied


def copy_of(module: nn.Module, known: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """Return a deep copy of a module; some of what it holds has copies, by identity.

    Empty dicts, which would take most of the time, have new ones before.
    """
    held = (value for each in module.modules() for value in vars(each).values())
    empty = {id(x): type(x)() for x in held if type(x) in (dict, OrderedDict) and not x}
    return copy.deepcopy(module, {**empty, **known})


def thin_shapes(model: nn.Module, rows: Collection[str] | None) -> dict[int, Sequence[int]]:
    """Return the shapes that parameters have in such a copy, by ``id`` of the model's own."""
    return _shapes(model, _thin_layers(model, rows))


def randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random fp64 numbers on the CPU."""
    return torch.randn(tuple(shape), dtype=torch.float64, device="cpu", generator=generator)


def _shapes(model: nn.Module, layers: Iterable[_Thin]) -> dict[int, Sequence[int]]:
    shapes: dict[int, Sequence[int]] = {id(p): tuple(p.shape) for _, p in model.named_parameters()}
    for layer in layers:
        for name, dim in layer.parameters.items():
            parameter = model.get_parameter(f"{layer.module}.{name}".strip("."))
            shape = list(parameter.shape)
            shape[dim] = FEATURES
            shapes[id(parameter)] = shape
    return shapes


def _values(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(tuple(shape), dtype=like.dtype) if like.is_meta else like.detach().cpu()
    spread = max(shape[-1], 1) ** -0.5 if len(shape) > 1 else 0.5
    return randn(shape, generator) * spread + (len(shape) < 2)


def _thin_layers(model: nn.Module, rows: Collection[str] | None) -> list[_Thin]:
    """Return the layers whose matrices become thin: all that share a weight, or none of them."""

    def weight_of(layer: _Thin) -> int:
        return id(model.get_submodule(layer.module)._parameters["weight"])

    found = [] if rows is None else list(_thin_candidates(model, rows))
    uses = Counter((weight_of(layer), layer.parameters["weight"]) for layer in found)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(False))
    return [
        layer
        for layer in found
        if uses[weight_of(layer), layer.parameters["weight"]] == owners[weight_of(layer)]
    ]


def _thin_candidates(model: nn.Module, rows: Collection[str]) -> Iterator[_Thin]:
    inside = tuple(  # which read the weights of their layers themselves
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    )
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if (
            weight is None
            or weight.dim() != 2
            or weight.numel() < LARGE
            or not weight.is_floating_point()
        ):
            continue
        if min(weight.shape) <= FEATURES or name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding):
            yield _Thin(name, {"weight": 1}, behind=weight.shape[1])
        elif is_linear(module):
            transposed = is_transposed(module)
            features, outputs = weight.shape if transposed else reversed(weight.shape)
            if name not in rows:
                yield _Thin(name, {"weight": 0 if transposed else 1}, before=features)
                continue
            dims = {"weight": 1 if transposed else 0}
            bias = module._parameters.get("bias")
            yield _Thin(name, dims if bias is None else {**dims, "bias": 0}, behind=outputs)


class _Narrow:
    """A forward pre-hook: the input is multiplied by a fixed matrix.

    Layers with one input get one result: they may be a group.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._given: tuple[Tensor, int] | None = None
        self._made: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any) -> Any:
        x, *rest = args
        same = self._given is not None and self._given[0] is x and self._given[1] == x._version
        if not same or self._made is None:
            self._given, self._made = (x, x._version), x @ self._matrix
        return (self._made, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Narrow":
        return _Narrow(self._matrix)


class _Widen(Uncopied):
    """A forward hook: the output is multiplied by a fixed matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output @ self._matrix


# --- the trial ---


TOLERANCE = 1e-4
"""Largest relative error. The trial is in fp64, but blocks may compute norms in fp32; a wrong
division is off by far more."""

NOISE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""By dtype of the trial: largest error relative to the largest gradient. Some are zero but for
rounding, such as that of a key's bias, which softmax does not see."""

SEED = 20190917
"""Of the random values of a trial; any would do, the same on all ranks. The gradients of outputs
have the next one: they must not be the values of some parameter."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A block, or a whole model, with random values, the arguments of a call, and its results.

    The module is in evaluation mode, so that nothing is dropped.

    Attributes:
        module: a copy.
        call: its arguments.
        results: of one process.
        trains: whether gradients are compared, too; a call of an evaluation has none.
        missing: names of the blocks that the copy lacks.
        failure: the error of the first attempt before, in words; "" without any.
    """

    module: nn.Module
    call: Call
    results: "Results"
    trains: bool = True
    missing: Collection[str] = ()
    failure: str = ""


class TrialForm(NamedTuple):
    """A form in which a module is tried.

    Attributes:
        module: to copy.
        rows: names of the layers that may be cut by rows: large matrices become thin in the other
            dim; None leaves all matrices as they are.
        dtype: of the trial: fp64, or fp32 where the code has no fp64 (products of experts).
        trains: whether there is a backward.
        missing: names of the blocks that the module lacks.
    """

    module: nn.Module
    rows: Collection[str] | None
    dtype: torch.dtype
    trains: bool = True
    missing: Collection[str] = ()


DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run of a block.

    Attributes:
        outputs: its floating point outputs.
        given: the gradients of the activations that came in, zeros where none came back.
        parameters: the gradient of each parameter, by name; None for a parameter without gradient.
    """

    outputs: list[Tensor]
    given: list[Tensor]
    parameters: dict[str, Tensor | None]

    def noise(self) -> float:
        """Return the largest error of a gradient that is rounding, beside the largest gradient."""
        gradients = [g for g in self.parameters.values() if g is not None]
        return max((g.norm().item() * NOISE[g.dtype] for g in gradients), default=0.0)


def make_trial(
    block: nn.Module, call: Call, rows: Collection[str] | None = None, *, trains: bool = True
) -> Trial:
    """Return the trial of a block; arguments as of ``TrialForm`` and ``first_trial``."""
    attempts = (TrialForm(block, rows, dtype, trains) for dtype in DTYPES)
    return first_trial(attempts, call, run_block)


def first_trial(
    attempts: Iterable[TrialForm], call: Call, run: Callable[[nn.Module, Call], Results]
) -> Trial:
    """Return the first of some trials that runs on the CPU.

    Args:
        attempts: values do not matter; modules may be on the meta device.
        call: the arguments: activations get random values, too; other tensors keep theirs.
        run: a copy.

    Raises:
        Exception: whatever the first one raised, where none runs.
        LookupError: there is none.
    """
    failure: Exception | None = None
    for module, rows, dtype, trains, missing in attempts:
        try:
            generator = torch.Generator().manual_seed(SEED)
            copied = random_copy(module, generator, rows, dtype)
            wide = _wide(call, generator, dtype)
            with rng.fork(SEED), torch.set_grad_enabled(trains):
                # A copy runs: what a block keeps of a forward could not be copied for the ranks.
                results = run(copy_of(copied), wide)
            failed = "" if failure is None else f"{type(failure).__name__}: {failure}"
            return Trial(copied, wide, results, trains, missing, failed)
        except Exception as error:  # whatever the user's code raises
            failure = failure or error
    raise failure or LookupError("nothing to try")


def verify(
    trial: Trial, plan: BlockPlan, ranks: int, *, sequence_parallel: bool
) -> tuple[frozenset[str] | None, str]:
    """Try a plan, but for its ``partial``.

    Returns:
        Names of the whole parameters whose gradients must be summed over ranks, and ""; or None,
        and why the plan is wrong.
    """

    def one_rank(communicator: Communicator) -> tuple[Results, dict[str, ShardingSpec]]:
        tokens = TokenShards() if sequence_parallel else None
        edges = Edges(communicator, tokens)
        block = copy_of(trial.module)
        facts = divide(block, plan, edges)
        with torch.set_grad_enabled(trial.trains):  # a thread has a mode of its own
            return run_block(block, trial.call, edges), facts

    if sequence_parallel and activation_in((trial.call.args, trial.call.kwargs)) is None:
        return None, "no activation comes in that could be cut into shards"
    try:
        with rng.fork(SEED):
            found = run_emulated(ranks, one_rank)
    except CollectiveError:
        return None, "its ranks would take different paths through the model"
    except Exception as error:  # whatever the user's code says to sizes that it does not expect
        return None, f"{type(error).__name__}: {error}"
    return _compare(trial.results, [results for results, _ in found], found[0][1])


def _compare(
    expected: Results, found: Sequence[Results], facts: Mapping[str, ShardingSpec]
) -> tuple[frozenset[str] | None, str]:
    for results in found:
        if len(results.outputs) != len(expected.outputs) or not all(
            map(is_close, results.outputs, expected.outputs)
        ):
            return None, "outputs differ"
        if not all(map(is_close, results.given, expected.given)):
            return None, "the gradients of the inputs differ"
    noise = expected.noise()
    partial = set()
    for name, whole in expected.parameters.items():
        mine = [results.parameters[name] for results in found]
        kind = _kind_of(whole, mine, facts[name], noise)
        if kind is None:
            return None, f"the gradients of {name!r} differ"
        if kind == "partial":
            partial.add(name)
    return frozenset(partial), ""


def _kind_of(
    whole: Tensor | None, mine: Sequence[Tensor | None], facts: ShardingSpec, noise: float
) -> str | None:
    """Return whether gradients of ranks are ``equal`` to the whole's, or ``partial`` sums."""
    gradients = [gradient for gradient in mine if gradient is not None]
    if whole is None or len(gradients) < len(mine):
        return "equal" if whole is None and not gradients else None
    if facts.partition is not None:
        joined = torch.zeros_like(whole)
        for rank, gradient in enumerate(gradients):
            facts.partition.put(joined, gradient, rank, add=True)
        return "equal" if is_close(joined, whole, noise) else None
    if all(is_close(gradient, whole, noise) for gradient in gradients):
        return "equal"
    return "partial" if is_close(torch.stack(gradients).sum(0), whole, noise) else None


def run_block(block: nn.Module, call: Call, edges: Edges | None = None) -> Results:
    """Run forward and backward; with edges as one of the ranks."""
    args, kwargs = call.copied()
    given = activation_in((args, kwargs))
    if given is not None:
        given.requires_grad_()
    wanted = [leaf for leaf in floating_in((args, kwargs)) if leaf.requires_grad]
    outputs = _outputs(block, (args, kwargs), given, edges)
    backward(outputs)
    return Results(
        [output.detach() for output in outputs],
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted],
        {name: _dense(parameter.grad) for name, parameter in block.named_parameters()},
    )


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _outputs(
    block: nn.Module, arguments: Any, inside: Tensor | None, edges: Edges | None
) -> list[Tensor]:
    """Return the floating point outputs of a block, whole on every rank.

    The first activation among the arguments is ``inside``; with tokens, a shard of it.
    """
    given = activation_in(arguments)
    tokens = None if given is None or edges is None else edges.tokens
    if given is None or inside is None or edges is None or tokens is None:
        args, kwargs = tree_map(lambda x: inside if x is given else x, arguments)
        return floating_in(block(*args, **kwargs))
    tokens.begin(given.shape[tokens.dim])
    sequence = tokens.partition(edges.ranks.size)
    shard = scatter(inside, edges.ranks, sequence)
    args, kwargs = tree_map(lambda x: shard if x is given else x, arguments)
    first, *others = floating_in(block(*args, **kwargs))
    return [gather(first, edges.ranks, sequence), *others]


def backward(outputs: Sequence[Tensor]) -> None:
    """Run backward from random gradients, equal wherever outputs have equal shapes."""
    generator = torch.Generator().manual_seed(SEED + 1)
    pairs = [(x, randn(x.shape, generator).to(x.device, x.dtype)) for x in outputs]
    if wanted := [(x, gradient) for x, gradient in pairs if x.requires_grad]:
        torch.autograd.backward([x for x, _ in wanted], [gradient for _, gradient in wanted])


def _wide(call: Call, generator: torch.Generator, dtype: torch.dtype) -> Call:
    """Return the arguments in the trial's dtype on the CPU, activations with random values."""

    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x is first or x.requires_grad:
            return randn(x.shape, generator).to(dtype).requires_grad_(x.requires_grad)
        return x.detach().to("cpu", dtype if x.is_floating_point() else x.dtype)

    first = activation_in((call.args, call.kwargs))
    args, kwargs = tree_map(widen, (call.args, dict(call.kwargs)))
    return Call(args, kwargs)


def activation_in(arguments: Any) -> Tensor | None:
    """Return the first activation among arguments; None if there is none."""
    return next((leaf for leaf in floating_in(arguments) if leaf.dim() > 1), None)


def floating_in(values: Any) -> list[Tensor]:
    """Return the floating point tensors among values."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def is_close(found: Tensor, expected: Tensor, noise: float = 0.0) -> bool:
    """Whether a tensor equals the expected one up to rounding and this much noise."""
    if found.shape != expected.shape:
        return False
    error = torch.linalg.vector_norm(found - expected)
    return bool(error <= TOLERANCE * torch.linalg.vector_norm(expected) + noise)


def find_layouts(
    trial: Trial, plan: BlockPlan, ranks: int, tokens: TokenShards | None
) -> dict[Site, DropoutLayout]:
    """Return how the ranks divide each dropout's input, by site inside of the block.

    Activations between groups are whole where ``tokens`` is None.

    Raises:
        ConfigError: it is not to be told.
    """

    def recorded(communicator: Communicator, divided: bool) -> dict[Site, list[Tensor]]:
        edges = Edges(communicator, TokenShards() if tokens is not None else None)
        block = copy_of(trial.module).train()
        if divided:
            divide(block, plan, edges)
        open_attentions(block, communicator)
        recorder = DropoutRecorder(block)
        with recorder.watching():
            run_block(block, trial.call, edges)
        return recorder.seen

    with rng.fork(SEED):
        whole = run_emulated(1, lambda communicator: recorded(communicator, False))[0]
    if not whole:
        return {}
    with rng.fork(SEED):
        parts = run_emulated(ranks, lambda communicator: recorded(communicator, True))
    found = {}
    for site, expected in whole.items():
        seen = [part.get(site, []) for part in parts]
        candidates = _candidates(trial.module, plan, ranks, tokens, expected[0])
        fitting = [each for each in candidates if _fits(each, expected, seen)]
        if not fitting:
            shapes = [[tuple(x.shape) for x in each] for each in seen]
            raise ConfigError(
                f"expected dropout {site.index} of {site.module!r} to be of something that is "
                f"whole on each rank, or divided as the layers around it, found shapes {shapes} "
                f"where one process has {[tuple(x.shape) for x in expected]}; leave these layers "
                "out of the plan, or give each dropout a module of its own"
            )
        found[site] = fitting[0]
    return found


def _candidates(
    block: nn.Module, plan: BlockPlan, ranks: int, tokens: TokenShards | None, whole: Tensor
) -> Iterator[DropoutLayout]:
    """Yield how the ranks may have divided a tensor."""
    yield None
    if tokens is not None and whole.dim() >= -tokens.dim:
        yield tokens
    partitions = [part for group in plan.groups for part in (*group.columns.values(), group.inputs)]
    partitions += [part for region in plan.regions for part in region.weights.values()]
    for name in plan.attentions:
        partitions.append(even(0, block.get_submodule(name).num_heads, ranks))
    for partition in dict.fromkeys(partitions):
        for dim in range(-1, -whole.dim() - 1, -1):
            scaled = _scaled(partition, dim, whole.shape[dim])
            if scaled is not None:
                yield scaled


def _scaled(partition: Partition, dim: int, count: int) -> Partition | None:
    """Return a partition of features as a partition of a dim that counts heads of features."""
    if not count or partition.size % count:
        return None
    unit = partition.size // count
    if any(edge % unit for mine in partition.ranges for pair in mine for edge in pair):
        return None
    ranges = tuple(tuple((a // unit, b // unit) for a, b in mine) for mine in partition.ranges)
    return Partition(dim, count, ranges)


def _fits(
    layout: DropoutLayout, expected: Sequence[Tensor], seen: Sequence[Sequence[Tensor]]
) -> bool:
    """Whether each rank saw, in every call, its share of the whole block's tensor."""
    if any(len(mine) != len(expected) for mine in seen):
        return False
    for call, whole in enumerate(expected):
        partition = layout
        if isinstance(layout, TokenShards):
            partition = even(layout.dim, whole.shape[layout.dim], len(seen))
        for rank, mine in enumerate(seen):
            share = whole
            if isinstance(partition, Partition):
                if whole.shape[partition.dim] != partition.size:
                    return False
                share = partition.take(whole, rank)
            if not is_close(mine[call], share):
                return False
    return True


# --- shapes under a plan that was found with thin matrices, and shapes of the block ---


logger = get_logger(__name__)


def find_misfit(
    block: nn.Module, call: Call, plan: BlockPlan, ranks: int, *, sequence_parallel: bool
) -> str:
    """Return why a plan does not fit the block as it is, without values; empty if it does.

    Blocks that read values cannot run without any: they fit, and a line says so.
    """
    whole = _outlined(copy_of(block, on_meta(block)))
    try:
        expected = _shapes_of(whole, call)
    except Exception as error:  # whatever the user's code raises without values
        logger.announce(
            f"tensor parallelism: {type(block).__name__} was tried with thin matrices alone, since "
            f"it does not run without values ({type(error).__name__}: {error})"
        )
        return ""

    def one_rank(communicator: Communicator) -> list[torch.Size]:
        edges = Edges(communicator, TokenShards() if sequence_parallel else None)
        mine = copy_of(block, on_meta(block))
        divide(mine, plan, edges)
        return _shapes_of(_outlined(mine), call, edges)

    try:
        found = run_emulated(ranks, one_rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(each == expected for each in found) else "outputs have other shapes"


def on_meta(block: nn.Module) -> dict[int, Any]:
    """Return parameters on the meta device for a copy of a block, by identity of its own."""
    return {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.is_floating_point())
        for p in block.parameters()
    }


def _outlined(block: nn.Module) -> nn.Module:
    """Return a block in evaluation mode that computes without values, and sends nothing."""
    cpu = torch.device("cpu")
    for module in block.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    outline: Any = StageProxy.of(tensor, cpu)
                    tensors[name] = outline
    return block.eval()


def _shapes_of(block: nn.Module, call: Call, edges: Edges | None = None) -> list[torch.Size]:
    arguments = call.copied()
    given = activation_in(arguments)
    outline = None if given is None else StageProxy.of(given, torch.device("cpu"))
    return [output.shape for output in _outputs(block, arguments, outline, edges)]
