"""The suite: one process trains the same; bytes are counted, state covers the model, failures tell.

Bytes are counted per TCP connection of this process, as the kernel sees them (``TCP_INFO``), and
not per interface, so that other programs on the machine do not show up in the count. Connections
are also cut: a failure of one rank becomes an error on the others, not a hang.
"""

import gc
import os
import socket
import stat
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from drivetrain import Accelerator
from drivetrain.cost import DISK, Cost, ModelSpec
from drivetrain.errors import CollectiveError, RankMismatchError
from drivetrain.model.modules import held_buffers, held_parameters
from drivetrain.shards import Shard
from drivetrain.testing.models import CASES, Case

# --- what all checks stand on ---

MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]

_EXACT = 1e-10
_ROUNDED = 2e-2
"""For models with bf16 inside: the order of additions shows in the third digit."""


def plain_sgd(model: nn.Module) -> Optimizer:
    """Return an optimizer whose step subtracts exactly the gradient."""
    return SGD(model.parameters(), lr=1.0)


def momentum(model: nn.Module) -> Optimizer:
    """Return SGD with momentum."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    """Return AdamW, without decay: whether an unused parameter decays is tested by itself."""
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


class Twins:
    """A model trained by the strategy and its twin trained in this process alone.

    The twin's gradient is the mean over ranks of the gradients of their mean losses; every method
    does the same to both and keeps them comparable.

    Args:
        accelerator: trains the one.
        case: the model, its batches and its loss.
        make_optimizer: makes the optimizer of either.
        wrap: a change of the model before ``prepare``, for example ``torch.compile``.
        make_scheduler: makes the scheduler of either from its optimizer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        case: Case,
        make_optimizer: MakeOptimizer = momentum,
        *,
        wrap: Callable[[nn.Module], Any] | None = None,
        make_scheduler: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.case = case
        self.axis = accelerator.mesh["dp"]
        self.twin = case.build()
        self.twin_optimizer = make_optimizer(self.twin)
        self.twin_scheduler = make_scheduler(self.twin_optimizer) if make_scheduler else None
        built = case.build()
        optimizer = make_optimizer(built)
        scheduler = make_scheduler(optimizer) if make_scheduler else None
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            wrap(built) if wrap else built, optimizer, scheduler
        )
        rounded = any(p.dtype is torch.bfloat16 for p in self.twin.parameters())
        self.tolerance = _ROUNDED if rounded else _EXACT

    def loss(self, step: int) -> Tensor:
        """Return this rank's loss of the prepared model."""
        loss = self.case.loss(self.model, self.case.batch(step, self.axis.rank))
        theirs = self.case.loss(self.twin, self.case.batch(step, self.axis.rank))
        self._compare("the loss", loss, theirs)
        return loss

    def backward(self, step: int) -> None:
        """Run forward and backward on both, and compare the losses.

        Only afterwards: where a model is cut into stages, backward brings the loss to all of them.
        """
        batch = self.case.batch(step, self.axis.rank)
        loss = self.case.loss(self.model, batch)
        self.accelerator.backward(loss)
        self._compare("the loss", loss, self.case.loss(self.twin, batch))
        self.backward_twin(step)

    def train_alone(self, first: int, last: int) -> None:
        """Run these steps on the prepared model, and not on the twin."""
        for step in range(first, last):
            batch = self.case.batch(step, self.axis.rank)
            self.accelerator.backward(self.case.loss(self.model, batch))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward_twin(self, step: int, *, without: int | None = None) -> None:
        """Run the twin on the batches of all ranks, or of all but one."""
        for rank in range(self.axis.size):
            if rank != without:
                loss = self.case.loss(self.twin, self.case.batch(step, rank))
                torch.autograd.backward(loss / self.axis.size)

    def step(self, *, set_to_none: bool = True) -> None:
        """Update both and clear the gradients of both."""
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
        for scheduler in (self.scheduler, self.twin_scheduler):
            if scheduler is not None:
                scheduler.step()
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.zero_grad(set_to_none=set_to_none)

    def train_both(self, first: int, last: int) -> None:
        """Run these steps on both."""
        for step in range(first, last):
            self.backward(step)
            self.step()

    def check(self) -> None:
        """Raise when the weights differ from the twin's in name, shape, dtype or value."""
        ours = weights(self.accelerator, self.model)
        theirs = dict(self.twin.named_parameters())
        assert list(ours) == list(theirs), f"names differ: {list(ours)} != {list(theirs)}"
        for name, tensor in ours.items():
            self._compare(name, tensor, theirs[name].detach())

    def _compare(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what} differs from one process on the same data\n{text}",
        )


def weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, Tensor]:
    """Return copies of the whole parameters of a prepared model, by the user's names.

    A stage of a pipeline has some of them: the others' come from the ranks that have them.
    """
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    with accelerator.strategy_of(model).state.gathered(list(inner.parameters())):
        mine = {name: p.detach().clone() for name, p in inner.named_parameters()}
    stages = accelerator.mesh.get("pp")
    if stages is None or stages.size == 1:
        return mine
    return {name: tensor for theirs in everyone(mine) for name, tensor in theirs.items()}


def everyone(value: Any) -> list[Any]:
    """Return the values of all ranks, sent past the strategy and its ledger."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Suite:
    """The ground of the conformance class.

    Attributes:
        strategy: the name of the strategy, or its name and options.
        worlds: the numbers of ranks it is tested on.
        cases: the awkward models, by name, of the checks that train all of them.
        timeout_s: seconds that one check may take.
        rounding: largest relative error of a first loss in a low dtype: the order of additions, or,
            for a strategy whose ranks add parts of a sum in that dtype, its precision.
        inner_axes: mesh axes whose ranks share one replica, and send no gradients over them.
    """

    strategy: ClassVar[str | Mapping[str, Any]]
    worlds: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    cases: ClassVar[Mapping[str, Case]] = CASES
    timeout_s: ClassVar[float] = 300.0
    rounding: ClassVar[float] = 1e-6
    inner_axes: ClassVar[Collection[str]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every check on every world."""
        if "world" in metafunc.fixturenames:
            metafunc.parametrize(
                "world",
                [
                    pytest.param(
                        n, marks=pytest.mark.ranks(n, timeout=self.timeout_s), id=f"ranks{n}"
                    )
                    for n in self.worlds
                ],
            )

    def models(self, *names: str) -> Sequence[Case]:
        """Return the models of these names; if ``cases`` has none of them, all that it has."""
        return [self.cases[name] for name in names if name in self.cases] or [*self.cases.values()]

    @contextmanager
    def accelerator(self, **options: Any) -> Iterator[Accelerator]:
        """Return an Accelerator with the strategy under test, taken off at the end.

        After an error the Accelerator is left alone: the processes end, and taking the strategy off
        could wait for ranks that are gone.
        """
        accelerator = self.make_accelerator(**options)
        yield accelerator
        accelerator.free_memory()

    def make_accelerator(self, **options: Any) -> Accelerator:
        """Return an Accelerator with the strategy under test."""
        return Accelerator(strategy=self.strategy, cpu=True, **options)

    def reduced_bytes(self, accelerator: Accelerator) -> int:
        """Return the bytes of reductions so far; gathers of parameters are not about gradients."""
        sent = accelerator.traffic.sent()
        return sum(
            count
            for (axis, operation), count in sent.items()
            if operation != "all_gather" and axis not in self.inner_axes
        )


# --- this process's TCP connections as the kernel sees them ---

_DESCRIPTORS = Path("/proc/self/fd")
_OFFSET = 200  # of bytes_sent and bytes_retrans in struct tcp_info, 64 bits each, Linux >= 4.19
_SIZE = _OFFSET + 16


def is_supported() -> bool:
    """Whether the kernel counts bytes per connection."""
    if not sys.platform.startswith("linux"):
        return False
    with socket.socket() as probe:
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)) == _SIZE


def sent_bytes() -> dict[int, int]:
    """Return the payload bytes sent on each open connection, repetitions left out, by inode."""
    counts = {}
    for each in _connections():
        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        sent, again = struct.unpack_from("=QQ", info, _OFFSET)
        counts[os.fstat(each.fileno()).st_ino] = sent - again
    return counts


def sent_since(before: Mapping[int, int]) -> int:
    """Return the bytes sent since a count, on the connections that are still open."""
    return sum(count - before.get(inode, 0) for inode, count in sent_bytes().items())


def cut_connections() -> None:
    """Shut every connection down: the other ranks see the same when a process ends."""
    for each in _connections():
        # gloo aborts the process when the socket it listens on is shut down.
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with suppress(OSError):  # the other end was faster
                each.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket of this process, open while it is looked at."""
    for entry in list(_DESCRIPTORS.iterdir()):
        copy = _socket_copy(int(entry.name))
        if copy is None:
            continue
        with copy as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and connection.type == socket.SOCK_STREAM:
                yield connection


def _socket_copy(descriptor: int) -> socket.socket | None:
    """Return a copy of a socket; None for other files.

    Threads of torch close sockets at any time, and another file may get the number.
    """
    try:
        copied = os.dup(descriptor)
    except OSError:  # closed since it was listed
        return None
    if stat.S_ISSOCK(os.fstat(copied).st_mode):
        return socket.socket(fileno=copied)
    os.close(copied)
    return None


# --- accounts ---

ON_DISK = "optimizer on disk"
STEPS = 3
CYCLE = 8
"""Steps after which a strategy holds again what it held: local steps meet after some."""

FIGURES = 256
"""Bytes of the run's figures that wait to be written: less than an activation of each step."""

SCRATCH = 2**23
"""Bytes that may be held beside the promised bytes, for the buffers of collectives over an axis:
less than a copy of the parameters of the model below."""


class AccountChecks(Suite):
    """``cost()`` is a promise."""

    def test_cost_equals_ledger(self, world: int) -> None:
        """Bytes sent per step, exactly, by axis and operation, for every awkward model."""
        wrong = {}
        with self.accelerator() as accelerator:
            for name, case in self.cases.items():
                twins = Twins(accelerator, case, plain_sgd)
                promised = _cost(accelerator, twins.model, case.build(), states=0).sent
                steps = 1 if case.large else 2
                twins.train_alone(0, 1)  # broadcasts at the beginning are no cost of a step
                before = accelerator.traffic.sent()
                twins.train_alone(0, steps)
                found = dict(Counter(accelerator.traffic.sent()) - Counter(before))
                expected = {key: count * steps for key, count in promised.items() if count}
                if accelerator.is_main_process and found != expected:
                    wrong[name] = f"cost() promised {expected}, the ledger has {found}"
                accelerator.free_memory()
        assert not wrong, f"bytes of all measured steps: {wrong}"

    def test_ledger_equals_kernel(self, world: int) -> None:
        """The ledger equals the kernel's counters of this process's own connections."""
        if not is_supported():
            pytest.skip("this system has no count of bytes per connection (Linux has)")
        with self.accelerator() as accelerator:
            train, model = _some_millions(accelerator)
            train()
            _wait_for_messages(accelerator, model)
            ledger, before = accelerator.traffic.total(), sent_bytes()
            for _ in range(STEPS):
                train()
            _wait_for_messages(accelerator, model)
            ledger, kernel = accelerator.traffic.total() - ledger, sent_since(before)
            assert abs(kernel - ledger) <= 0.02 * ledger + 2**16, (
                f"in {STEPS} steps the ledger has {ledger} bytes, the kernel sent {kernel}"
            )

    def test_cost_equals_memory(self, world: int) -> None:
        """Bytes held between steps, by kind, and nothing large besides them."""
        gc.collect()
        before = _live_bytes()
        with self.accelerator() as accelerator:
            train, model = _some_millions(accelerator)
            for _ in range(2):
                train()
            gc.collect()
            live = _live_bytes() - before
            strategy = accelerator.strategy_of(model)
            promised = dict(_cost(accelerator, model, _layers(), states=2).held)
            inner = accelerator.unwrap_model(model)
            (optimizer,) = accelerator._state.model(model).optimizers
            states = [value for state in optimizer.state.values() for value in state.values()]
            if not states:  # a store has them
                names = [name for name, _ in inner.named_parameters()]
                states = [shard.tensor for shard in strategy.state.states(0, names)]
            groups = optimizer.param_groups
            stepped = [parameter for group in groups for parameter in group["params"]]
            found = {
                "parameters": _bytes([*held_parameters(inner), *stepped]),
                "gradients": _bytes(
                    [*strategy.gradients(), *(p.grad for p in held_parameters(inner))]
                ),
                "optimizer": _bytes(states),
                "buffers": _bytes(held_buffers(inner).values()),
            }
            promised["optimizer"] = promised.get("optimizer", 0) + promised.get(ON_DISK, 0)
            for kind, count in found.items():
                expected = promised.get(kind, 0)
                assert abs(count - expected) <= 0.01 * expected + 256, (
                    f"cost() promised {expected} bytes of {kind}, found {count}"
                )
            total = sum(n for kind, n in promised.items() if not kind.endswith(DISK))
            axes = {axis for axis, _ in accelerator.traffic.sent()}
            assert live <= 1.01 * total + SCRATCH * max(1, len(axes)), (
                f"cost() promised {total} bytes in all, found {live} alive"
            )

    def test_nothing_outlives_its_step(self, world: int) -> None:
        """Tensors of earlier steps are freed: activations, outputs, gradients and what is sent."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, self.models("mlp")[0])
            held = []
            for first in range(0, 3 * CYCLE, CYCLE):
                twins.train_alone(first, first + CYCLE)
                _wait_for_messages(accelerator, twins.model)
                gc.collect()
                held.append(_bytes(tensor for tensor in _live_tensors() if tensor.dim()))
            assert held[-1] <= held[-2] + FIGURES, f"bytes alive after every {CYCLE} steps: {held}"


def reduces_each(twins: Twins) -> bool:
    """Return whether a strategy promises to send gradients of every micro-batch of a window."""
    strategy = twins.accelerator.strategy_of(twins.model)
    spec = ModelSpec.of(twins.twin)
    reduced = [
        sum(
            nbytes
            for (_, operation), nbytes in type(strategy)
            .cost(strategy.config, spec, replace(strategy.run, accumulation=window))
            .sent.items()
            if "reduce" in operation
        )
        for window in (1, 2)
    ]
    return reduced[1] > reduced[0]


def _some_millions(accelerator: Accelerator) -> tuple[Callable[[], None], nn.Module]:
    """Return one training step of a model of three million parameters in fp32, and the model."""
    model = _layers()
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    generator = torch.Generator().manual_seed(accelerator.mesh["dp"].rank)
    inputs = torch.randn(4, 7, generator=generator)

    def train() -> None:
        optimizer.zero_grad()
        accelerator.backward(prepared(inputs).square().mean())
        optimizer.step()

    return train, prepared


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 1500))


def _wait_for_messages(accelerator: Accelerator, model: nn.Module) -> None:
    """Wait for messages that are under way: whole values are there when nothing is."""
    with accelerator.gathered(model):
        pass
    # What this rank has handed over may wait in the kernel until the others have taken it.
    everyone(None)


def _cost(accelerator: Accelerator, model: nn.Module, described: nn.Module, *, states: int) -> Cost:
    strategy = accelerator.strategy_of(model)
    return type(strategy).cost(
        strategy.config, ModelSpec.of(described, states=states), strategy.run
    )


def _bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of the storages behind tensors, shared ones once."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # a tensor that has facts and no memory
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def _live_bytes() -> int:
    """Return the bytes of all storages that Python can reach in this process."""
    return _bytes(_live_tensors())


def _live_tensors() -> Iterator[Tensor]:
    """Yield all tensors that Python can reach in this process, and their gradients."""
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), Tensor)]:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


# --- state ---


class StateChecks(Suite):
    """The yield of ``shards``, and save and load."""

    def test_shards_hold_everything_once(self, world: int) -> None:
        """Parameters, buffers and optimizer state, each element on exactly one rank."""
        with self.accelerator() as accelerator:
            for case in self.models("tied", "odd_shapes", "transposed", "batchnorm", "adapted"):
                twins = Twins(accelerator, case, adamw)
                twins.train_both(0, 1)
                shards = accelerator.strategy_of(twins.model).state.shards()
                mine = [replace(one, tensor=one.tensor.detach().clone()) for one in shards]
                whole = _assembled([shard for theirs in everyone(mine) for shard in theirs])
                parameters = weights(accelerator, twins.model)
                for key, tensor in parameters.items():
                    assert (key, "") in whole, f"{case.name}: no shard of the parameter {key}"
                    torch.testing.assert_close(whole[key, ""], tensor, rtol=0.0, atol=0.0)
                persistent = set(twins.twin.state_dict()) - {
                    key for key, _ in twins.twin.named_parameters(remove_duplicate=False)
                }
                assert {key for key, state in whole if not state} == {*parameters, *persistent}
                for key, parameter in twins.twin.named_parameters():
                    for state, value in twins.twin_optimizer.state.get(parameter, {}).items():
                        if value.shape == parameter.shape and parameter.dim() and value.numel():
                            torch.testing.assert_close(
                                whole[key, f"0.{state}"], value, rtol=1e-9, atol=1e-12
                            )
                accelerator.free_memory()

    def test_saved_run_goes_on_bit_by_bit(self, world: int, tmp_path: Path) -> None:
        """After load the next steps of several models give the same bits as without the stop."""
        results = []
        for resumed in (False, True):
            with self.accelerator() as accelerator:
                cases = self.models("tied", "odd_shapes", "mixed_dtypes", "batchnorm")
                trained = [Twins(accelerator, case, adamw) for case in cases]
                for twins in () if resumed else trained:
                    twins.train_alone(0, 2)
                load_or_save = accelerator.load_state if resumed else accelerator.save_state
                load_or_save(tmp_path)
                for twins in trained:
                    twins.train_alone(2, 4)
                results.append([weights(accelerator, twins.model) for twins in trained])
        for case, *both in zip(cases, *results, strict=True):
            for key, tensor in both[0].items():
                assert torch.equal(tensor, both[1][key]), f"{case.name}: {key} differs after load"


def _assembled(shards: list[Shard]) -> dict[tuple[str, str], Tensor]:
    """Put shards together; raise when an element is missing or there twice."""
    whole: dict[tuple[str, str], Tensor] = {}
    counts: dict[tuple[str, str], Tensor] = {}
    for shard in shards:
        key, part, dtype = (shard.name, shard.state), shard.part, shard.tensor.dtype
        box = tuple(slice(o, o + size) for o, size in zip(part.offsets, part.sizes, strict=True))
        values = whole.setdefault(key, torch.zeros(shard.shape, dtype=dtype))
        count = counts.setdefault(key, torch.zeros(shard.shape, dtype=torch.int64))
        held = torch.zeros(torch.Size(part.sizes), dtype=dtype)
        here = torch.zeros(torch.Size(part.sizes), dtype=torch.int64)
        start, stop = part.range
        held.view(-1)[start:stop] = shard.tensor.reshape(-1)
        here.view(-1)[start:stop] = 1
        values[box] += held
        count[box] += here
    for (name, state), count in counts.items():
        times = sorted(set(count.flatten().tolist()))
        assert times in ([1], []), f"elements of {name} {state} are held {times} times, not once"
    return whole


# --- failures ---


class FailureChecks(Suite):
    """Errors that users will make."""

    def test_one_rank_that_dies(self, world: int) -> None:
        """When the process of one rank ends, backward fails on the others, before the timeout."""
        if world == 1 or not is_supported():
            pytest.skip("needs a rank to end and one to stay, and Linux")
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        twins.train_both(0, 1)
        everyone(None)
        if accelerator.process_index == world - 1:
            cut_connections()
            accelerator.free_memory()
            return
        with pytest.raises(CollectiveError):
            accelerator.backward(twins.loss(1))
        accelerator.free_memory()

    def test_ranks_with_different_models(self, world: int) -> None:
        """``prepare`` names the first difference on every rank."""
        if world == 1:
            pytest.skip("needs two ranks to disagree")
        with self.accelerator() as accelerator:
            case = CASES["tied" if accelerator.process_index == 0 else "mlp"]
            with pytest.raises(RankMismatchError, match="rank"):
                accelerator.prepare(case.build())
