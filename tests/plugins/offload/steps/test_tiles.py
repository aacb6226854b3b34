"""The tiled update against torch.optim over the whole shard, bit by bit."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from drivetrain.errors import UsageError
from drivetrain_offload.steps.rules import GroupStep, Rule, update_rule
from drivetrain_offload.steps.tiles import ALIGNMENT, SMALLEST_TILE, Piece, Tiler, tiles

FACTOR = 0.37109843
RULES = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (AdamW, {"lr": torch.tensor(3e-3), "amsgrad": True, "maximize": True}),
    (Adam, {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1, "eps": 1e-6}),
    (Adam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (SGD, {"lr": 1e-1}),
    (SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adagrad, {"lr": 1e-1, "lr_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True}),
]
ADAMW = RULES[0]
LOOPS = [(kind, {**options, "fused": None}) for kind, options in RULES]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The kernels cut a whole shard by torch's threads, at places that are not aligned."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiler() -> Iterator[Tiler]:
    with closing(Tiler(threads=1)) as one:
        yield one


class Plain:
    """torch.optim over the whole tensor; gradients cast, scaled and clipped before, in passes."""

    def __init__(self, kind: type[Optimizer], options: dict, values: Tensor) -> None:
        self.parameter = torch.nn.Parameter(values.clone())
        self.optimizer = kind([self.parameter], **{"fused": True, **options})

    def step(self, gradient: Tensor, factor: float | Tensor = 1.0) -> None:
        self.parameter.grad = gradient.to(self.parameter.dtype, copy=True)
        torch._foreach_mul_([self.parameter.grad], factor)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.parameter]


class Shard:
    """The same under a rule, in tiles."""

    def __init__(self, kind: type[Optimizer], options: dict, values: Tensor, out=None) -> None:
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


def assert_same(shard: Shard, plain: Plain) -> None:
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


@pytest.mark.parametrize(("kind", "options"), RULES + LOOPS)
@pytest.mark.parametrize("numel", [1, 63, 1000, 10_007])
def test_many_steps_have_the_bits_of_torch(kind, options, numel) -> None:
    values = torch.randn(numel)
    plain, shard = Plain(kind, options, values), Shard(kind, options, values, torch.bfloat16)
    # Tiles of 1024 elements: SMALLEST_TILE does not make them longer than the scratch.
    with closing(Tiler(threads=1, tile_bytes=4096)) as small:
        for gradient in gradients(numel, torch.bfloat16, 5):
            plain.step(gradient, FACTOR)
            small.update_all([(shard.begin(FACTOR), shard.piece(gradient))])
            assert_same(shard, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, FACTOR, torch.tensor(FACTOR, dtype=torch.float64)])
def test_every_dtype_of_gradient(tiler, dtype, factor) -> None:
    values, wanted = torch.randn(5003), gradients(5003, dtype, 3)
    plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, torch.float16)
    for gradient in wanted:
        before = gradient.clone()
        plain.step(gradient, factor)
        tiler.update_all([(shard.begin(factor), shard.piece(gradient))])
        assert same_bits(gradient, before)
    assert_same(shard, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_masters_that_are_not_fp32(tiler, dtype) -> None:
    values = torch.randn(3001).to(dtype)
    plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, torch.bfloat16)
    for gradient in gradients(3001, torch.bfloat16, 3):
        plain.step(gradient, 0.5)  # in bf16, _foreach_mul_ and mul_ round other factors differently
        tiler.update_all([(shard.begin(0.5), shard.piece(gradient))])
    assert_same(shard, plain)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("of_torch", [1, 2])
def test_threads_change_no_bit(threads, of_torch) -> None:
    numel = 3 * SMALLEST_TILE + 77
    values = torch.randn(numel)
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


def test_each_thread_computes_alone_and_no_other_thread_is_changed() -> None:
    seen: list[int] = []

    def probe(master: Tensor, gradient: Tensor, states: object) -> None:
        seen.append(torch.get_num_threads())

    shard = Shard(*ADAMW, torch.zeros(2 * SMALLEST_TILE))
    torch.set_num_threads(2)
    with closing(Tiler(threads=2)) as two:
        step = GroupStep(probe, frozenset(shard.states))
        two.update_all([(step, shard.piece(shard.master.bfloat16()))])
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    assert seen == [1, 1, 2]
    assert torch.get_num_threads() == 2


def test_masters_may_be_parameters(tiler) -> None:
    values, gradient = torch.randn(100), torch.randn(100)
    plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, torch.bfloat16)
    plain.step(gradient)
    parameter = torch.nn.Parameter(shard.master)
    tiler.update_all([(shard.begin(), shard.piece(gradient)._replace(master=parameter))])
    assert_same(shard, plain)
    assert not shard.out.requires_grad


def test_pieces_of_a_shard_one_by_one(tiler) -> None:
    values = torch.randn(5000)
    plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values, torch.bfloat16)
    for gradient in gradients(5000, torch.bfloat16, 3):
        plain.step(gradient)
        step = shard.begin()
        for where in tiles(5000, 1024):
            tiler.update_all([(step, shard.piece(gradient).at(where))])
    assert_same(shard, plain)


def test_pieces_of_several_shards_in_one_call() -> None:
    sizes = [0, 1, 64, 5003, SMALLEST_TILE + 9]
    values = [torch.randn(numel) for numel in sizes]
    plains = [Plain(*RULES[i % 3], each) for i, each in enumerate(values)]
    shards = [Shard(*RULES[i % 3], each, torch.bfloat16) for i, each in enumerate(values)]
    with closing(Tiler(threads=2)) as two:
        for _ in range(3):
            wanted = [torch.randn(numel).to(torch.float16) for numel in sizes]
            for plain, gradient in zip(plains, wanted, strict=True):
                plain.step(gradient)
            each = zip(shards, wanted, strict=True)
            two.update_all([(shard.begin(), shard.piece(grad)) for shard, grad in each])
        two.update_all([])
    for shard, plain in zip(shards, plains, strict=True):
        assert_same(shard, plain)


@pytest.mark.parametrize("of_torch", [1, 2])
def test_threads_share_the_pieces_of_a_call(of_torch) -> None:
    meeting = threading.Barrier(2, timeout=300)

    def meet(master: Tensor, gradient: Tensor, states: object) -> None:
        meeting.wait()  # breaks unless two threads come at once

    shard = Shard(*ADAMW, torch.zeros(64))
    torch.set_num_threads(of_torch)
    with closing(Tiler(threads=2)) as two:
        update = GroupStep(meet, frozenset(shard.states)), shard.piece(shard.master)
        two.update_all([update] * 4)


def test_a_call_with_one_piece_that_does_not_fit_changes_none(tiler) -> None:
    shard = Shard(*ADAMW, torch.zeros(64))
    step, good = shard.begin(), shard.piece(torch.ones(64))
    with pytest.raises(UsageError, match="gradient"):
        tiler.update_all([(step, good), (step, good._replace(gradient=torch.ones(3)))])
    assert not shard.master.any()


def test_a_schedule_reaches_the_next_step_not_the_one_under_way(tiler) -> None:
    values = torch.randn(100)
    plain, shard = Plain(*ADAMW, values), Shard(*ADAMW, values)
    for i, gradient in enumerate(gradients(100, torch.float32, 3)):
        plain.step(gradient)
        step = shard.begin()
        shard.group["lr"] = plain.optimizer.param_groups[0]["lr"] = 1e-2 / (i + 2)
        shard.taken += 1  # as a next step that begins early would
        tiler.update_all([(step, shard.piece(gradient))])
        shard.taken -= 1
    assert_same(shard, plain)


@pytest.mark.parametrize(("kind", "options"), RULES)
def test_resumes_from_the_state_of_torch(tiler, kind, options) -> None:
    values, wanted = torch.randn(300), gradients(300, torch.float32, 4)
    plain, shard = Plain(kind, options, values), Shard(kind, options, values)
    for gradient in wanted[:2]:
        plain.step(gradient)
    shard.master.copy_(plain.parameter.detach())
    shard.taken = shard.rule.taken(plain.state)
    for name, state in shard.states.items():
        state.copy_(plain.state[name])
    for gradient in wanted[2:]:
        plain.step(gradient)
        tiler.update_all([(shard.begin(), shard.piece(gradient))])
    assert_same(shard, plain)


@pytest.mark.parametrize(("kind", "options"), RULES)
def test_states_are_those_of_torch(kind, options) -> None:
    plain = Plain(kind, options, torch.zeros(3))
    shard = Shard(kind, options, torch.zeros(3))
    plain.step(torch.zeros(3))
    kept = {name for name, state in plain.state.items() if name != "step" and state is not None}
    assert shard.states.keys() == kept


def test_only_what_the_kernels_can_do_has_a_rule() -> None:
    class Mine(AdamW):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert update_rule(AdamW(parameters)) is not None
    assert update_rule(AdamW(parameters, fused=True)) is not None
    assert update_rule(Mine(parameters)) is None
    assert update_rule(torch.optim.RMSprop(parameters)) is None
    assert update_rule(AdamW(parameters, capturable=True)) is None
    assert update_rule(SGD(parameters, differentiable=True)) is None
    assert update_rule(Adagrad(parameters, foreach=True)) is None
    assert update_rule(Adam(parameters, fused=False)) is not None
    second = {"params": [torch.nn.Parameter(torch.zeros(2))], "foreach": True}
    assert update_rule(SGD([{"params": parameters}, second])) is None


def test_ranges_cover_a_shard_once() -> None:
    assert list(tiles(0, 64)) == []
    assert list(tiles(64, 64)) == [slice(0, 64)]
    assert list(tiles(200, 128)) == [slice(0, 128), slice(128, 200)]
    for length in (0, -64, ALIGNMENT + 1):
        with pytest.raises(UsageError, match="multiple of 64, found"):
            tiles(100, length)


def test_refuses_what_does_not_fit_and_says_what(tiler) -> None:
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
    with pytest.raises(UsageError, match="at least 1 thread.*found 0"):
        Tiler(threads=0)
    with pytest.raises(UsageError, match="at least 512 bytes, found 4"):
        Tiler(threads=1, tile_bytes=4)


def test_threads_end_with_their_tiler() -> None:
    shard = Shard(*ADAMW, torch.zeros(128))
    tiler = Tiler(threads=2)
    assert own_threads() >= 2
    before = own_threads()
    tiler.close()
    tiler.close()
    assert own_threads() == before - 2
    with pytest.raises(UsageError, match="closed"):
        tiler.update_all([(shard.begin(), shard.piece(torch.zeros(128)))])


def own_threads() -> int:
    return sum(thread.name.startswith("drivetrain-tiles") for thread in threading.enumerate())


@pytest.mark.parametrize("of_torch", [1, 2])
def test_an_error_in_a_thread_is_the_callers_and_the_next_piece_goes_on(tiler, of_torch) -> None:
    torch.set_num_threads(of_torch)
    values = torch.randn(128)
    shard, plain = Shard(*ADAMW, values), Plain(*ADAMW, values)
    gradient = torch.randn(128)

    def broken(master: Tensor, gradient: Tensor, states: object) -> None:
        raise RuntimeError("kernel broke")

    states = frozenset(shard.states)
    with pytest.raises(RuntimeError, match="kernel broke"):
        tiler.update_all([(GroupStep(broken, states), shard.piece(gradient))])
    plain.step(gradient)
    tiler.update_all([(shard.begin(), shard.piece(gradient))])
    assert_same(shard, plain)
