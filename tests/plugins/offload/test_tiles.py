"""The tiled update against torch.optim over the whole shard, bit by bit."""

import threading
from contextlib import closing

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW

from drivetrain.errors import UsageError
from drivetrain_offload.tiles import SMALLEST_TILE, GroupStep, Piece, Rule, Tiler, update_rule

FACTOR = 0.37109843
ADAMW = AdamW, {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_torch_thread():
    """The kernels cut a whole shard by torch's threads, at places that are not aligned."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiler():
    with closing(Tiler(threads=1)) as one:
        yield one


class Plain:
    """torch.optim over the whole tensor; gradients cast, scaled and clipped before, in passes."""

    def __init__(self, kind, options, values):
        self.parameter = torch.nn.Parameter(values.clone())
        self.optimizer = kind([self.parameter], **{"fused": True, **options})

    def step(self, gradient: Tensor, factor: float | Tensor = 1.0):
        self.parameter.grad = gradient.to(self.parameter.dtype, copy=True)
        torch._foreach_mul_([self.parameter.grad], factor)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.parameter]


class Shard:
    """The same under a rule, in tiles."""

    def __init__(self, kind, options, values, out=None):
        optimizer = kind([torch.nn.Parameter(values.clone())], **{"fused": True, **options})
        rule = update_rule(optimizer)
        assert rule is not None
        self.rule: Rule = rule
        self.group = optimizer.param_groups[0]
        self.master = values.clone()
        self.states = {
            name: torch.full_like(values, initial)
            for name, initial in rule.states(self.group).items()
        }
        self.taken = rule.taken({})
        self.out = None if out is None else torch.full_like(values, -7.0, dtype=out)

    def begin(self, factor: float | Tensor = 1.0) -> GroupStep:
        self.taken += 1
        return self.rule.step(self.group, self.taken - 1, float(factor))

    def piece(self, gradient: Tensor) -> Piece:
        return Piece(self.master, gradient, self.states, self.out)


def assert_same(shard: Shard, plain: Plain):
    assert same_bits(shard.master, plain.parameter.detach())
    for name, state in shard.states.items():
        assert same_bits(state, plain.state[name]), name
    if shard.out is not None:
        assert same_bits(shard.out, plain.parameter.detach().to(shard.out.dtype))
    if "step" in plain.state:
        assert shard.taken == plain.state["step"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gradients(numel: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=made).to(dtype) for _ in range(count)]


def test_every_dtype_of_gradients_and_masters(tiler):
    low, half, single, double = torch.bfloat16, torch.float16, torch.float32, torch.float64
    for dtype, master, factor in (
        (half, single, FACTOR),
        (single, single, torch.tensor(FACTOR, dtype=double)),
        (double, single, FACTOR),
        (low, low, 0.5),  # in bf16, _foreach_mul_ and mul_ round other factors differently
        (low, double, 1.0),
    ):
        values, wanted = torch.randn(5003).to(master), gradients(5003, dtype, 3)
        plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, half)
        for gradient in wanted:
            before = gradient.clone()
            plain.step(gradient, factor)
            tiler.update_all([(shard.begin(factor), shard.piece(gradient))])
            assert same_bits(gradient, before)
        assert_same(shard, plain)


def test_threads_change_no_bit():
    numel = 3 * SMALLEST_TILE + 77
    values = torch.randn(numel)
    for threads, of_torch in ((3, 2), (3, 1)):
        plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, torch.bfloat16)
        torch.set_num_threads(of_torch)
        with closing(Tiler(threads)) as several:
            assert torch.get_num_threads() == of_torch
            for gradient in gradients(numel, torch.bfloat16, 2):
                torch.set_num_threads(1)
                plain.step(gradient, FACTOR)
                torch.set_num_threads(of_torch)
                several.update_all([(shard.begin(FACTOR), shard.piece(gradient))])
        assert_same(shard, plain)


def test_threads_share_the_pieces_of_a_call_and_end_with_their_tiler():
    meeting = threading.Barrier(2, timeout=300)

    def meet(master: Tensor, gradient: Tensor, states: object):
        meeting.wait()  # breaks unless two threads come at once

    def own_threads():
        return sum(each.name.startswith("drivetrain-tiles") for each in threading.enumerate())

    shard, before = Shard(*ADAMW, torch.zeros(64)), own_threads()
    tiler = Tiler(threads=2)
    update = GroupStep(meet, frozenset(shard.states)), shard.piece(shard.master)
    tiler.update_all([update] * 4)
    assert own_threads() == before + 2
    tiler.close()
    tiler.close()
    assert own_threads() == before
    with pytest.raises(UsageError, match="closed"):
        tiler.update_all([(shard.begin(), shard.piece(torch.zeros(64)))])


def test_only_what_the_kernels_can_do_has_a_rule():
    class Mine(AdamW):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    second = {"params": [torch.nn.Parameter(torch.zeros(2))], "foreach": True}
    for can in (AdamW(parameters), AdamW(parameters, fused=True), Adam(parameters, fused=False)):
        assert update_rule(can) is not None
    for cannot in (
        Mine(parameters),
        torch.optim.RMSprop(parameters),
        AdamW(parameters, capturable=True),
        SGD(parameters, differentiable=True),
        Adagrad(parameters, foreach=True),
        SGD([{"params": parameters}, second]),
    ):
        assert update_rule(cannot) is None


def test_refuses_what_does_not_fit_and_says_what(tiler):
    shard = Shard(*ADAMW, torch.zeros(128))
    step, piece = shard.begin(), shard.piece(torch.zeros(128))
    half = {name: state.bfloat16() for name, state in shard.states.items()}
    for wrong, words in [
        (piece._replace(gradient=torch.zeros(127)), r"gradient.*128 elements.*\(127,\)"),
        (piece._replace(gradient=torch.zeros(256)[::2]), r"gradient to be contiguous.*\(2,\)"),
        (piece._replace(out=torch.zeros(2, 64)), r"out.*1-D.*\(2, 64\)"),
        (piece._replace(out=torch.zeros(128, device="meta")), "out on the CPU, found it on meta"),
        (piece._replace(states=half), "exp_avg in the master's dtype, torch.float32, found"),
        (piece._replace(states={}), r"\['exp_avg', 'exp_avg_sq'\], found \[\]"),
    ]:
        with pytest.raises(UsageError, match=words):
            tiler.update_all([(step, wrong)])


@pytest.mark.parametrize("of_torch", [1, 2])
def test_errors_are_the_callers_change_nothing_and_the_next_piece_goes_on(tiler, of_torch):
    torch.set_num_threads(of_torch)
    values, gradient = torch.randn(128), torch.randn(128)
    shard, plain = Shard(*ADAMW, values), Plain(*ADAMW, values)

    def broken(master: Tensor, gradient: Tensor, states: object):
        raise RuntimeError("kernel broke")

    good, states = shard.piece(gradient), frozenset(shard.states)
    with pytest.raises(RuntimeError, match="kernel broke"):
        tiler.update_all([(GroupStep(broken, states), good)])
    with pytest.raises(UsageError, match="gradient"):
        tiler.update_all(
            [(shard.begin(), good), (shard.begin(), good._replace(gradient=values[:3]))]
        )
    shard.taken = 0
    plain.step(gradient)
    tiler.update_all([(shard.begin(), good)])
    assert_same(shard, plain)
