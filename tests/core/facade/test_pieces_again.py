"""A batch that runs out of memory on one rank: all ranks take it again, in smaller pieces."""

import copy
import resource
import weakref

import psutil
import pytest
import torch
from torch import nn

from drivetrain import Accelerator, GradScalerKwargs
from drivetrain.facade import pieces
from drivetrain.testing.models import WIDTH
from stacks import Tower

ROWS = 9
ERRORS = (
    (MemoryError, ""),
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 GiB"),
    (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
)


class Shortage(nn.Module):
    """Computes what its module does; more rows than fit are an allocator's error.

    Args:
        inner: the module.
        ranks: those with too little memory.
        where: ``forward`` or ``backward``.
    """

    def __init__(self, inner, ranks=(1,), where="forward"):
        super().__init__()
        self.inner, self.where, self.ranks = inner, where, ranks
        self.fits, self.rank, self.errors = 10**6, 0, 0
        self.taken, self.held = [], []

    def forward(self, x):
        assert all(each() is None for each in self.held)  # of the pieces before
        self.taken.append(len(x))
        middle = self.inner.body(self.inner.first(x))
        self.held = [weakref.ref(middle)]
        if len(x) > self.fits and self.rank in self.ranks:
            if self.where == "forward":
                self._fail()
            middle.register_hook(self._fail)
        return self.inner.last(middle)

    def _fail(self, *_):
        self.errors += 1
        kind, text = ERRORS[self.errors % len(ERRORS)]
        raise kind(text)


def rows_of(batch, rank):
    generator = torch.Generator().manual_seed(10 * batch + rank)
    return torch.randn(ROWS + rank, WIDTH, generator=generator, dtype=torch.float64)


def squares(model):
    return lambda part: model(part).square().mean()


def prepared(strategy, option="auto", *, model=None, windows=2, **options):
    accelerator = Accelerator(
        strategy=strategy,
        cpu=True,
        gradient_accumulation_steps=windows,
        config={"micro_batch": option},
        **options,
    )
    model.rank = accelerator.process_index
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, *accelerator.prepare(model, sgd)


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ("ddp", "forward"),
        ("zero1", "backward"),
        ("zero2", "forward"),
        ("zero2", "backward"),
        ("ddp", "backward"),
        ({"name": "zero2", "accumulate": "local"}, "forward"),
        ({"name": "zero2", "offload": {"optimizer": "cpu"}}, "backward"),
        ("plain", "forward"),
    ],
    ids=str,
)
@pytest.mark.ranks(2)
def test_a_step_is_that_of_whole_batches_though_one_rank_runs_out_of_memory(strategy, where):
    """In the second batch of a window, whose first left gradients, and in the first of the next."""
    alone = Tower()
    model = Shortage(copy.deepcopy(alone), where=where)
    accelerator, model, optimizer = prepared(strategy, model=model)
    ours = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    window = []
    for batch, fits in enumerate((ROWS + 1, 3, 2, 2)):
        model.fits = fits
        mine = rows_of(batch, accelerator.process_index)
        expected = alone(mine).square().mean()
        loss = accelerator.backward_in_pieces(mine, squares(model))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        window += [rows_of(batch, rank) for rank in range(2)]
        if batch % 2:
            alone(torch.cat(window)).square().mean().backward()
            ours.step()
            ours.zero_grad()
            window = []
        optimizer.step()
        optimizer.zero_grad()
    assert model.errors == (2 if accelerator.process_index else 0)
    found = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[f"inner.{name}"], value, rtol=1e-12, atol=1e-12)
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero2", "no"), ("ddp", "fp16"), ("zero1", "fp16")]
)
@pytest.mark.ranks(2)
def test_a_batch_that_is_taken_again_draws_the_numbers_of_one_in_smaller_pieces(
    strategy, precision
):
    """Dropout's masks, and with a loss scale the same bits, added to what the script has left."""
    states = []
    for told in (True, False):
        torch.manual_seed(0)
        model = Shortage(Tower(dropout=0.5), where="backward")
        if precision == "fp16":
            model.float()
        scaler = GradScalerKwargs(init_scale=8.0)
        accelerator, model, optimizer = prepared(
            strategy, model=model, mixed_precision=precision, kwargs_handlers=[scaler]
        )
        measured = accelerator._pieces._measured
        if told:
            measured.peaks, measured.longest = {WIDTH: 1}, WIDTH
        torch.manual_seed(accelerator.process_index)
        for batch, fits in enumerate((4, 4, 2, 2)):
            if told:
                measured.most = (4, 4, 1, 1)[batch] * WIDTH
            else:
                model.fits = fits
            mine = rows_of(batch, accelerator.process_index)
            mine = mine if precision == "no" else mine.float()
            accelerator.backward_in_pieces(mine, squares(model))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert model.errors == (0 if told else 2 * accelerator.process_index)
        states.append(accelerator.get_state_dict(model))
        accelerator.free_memory()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


@pytest.mark.ranks(2)
def test_gradients_of_before_the_window_and_hooks_of_the_script_stay_right():
    """A gradient that a script has left is added to, and its hooks see what they saw."""
    alone, seen = Tower(), []
    for option, limits in ((4, (99, 99)), ("auto", (99, 5))):
        model = Shortage(copy.deepcopy(alone))
        accelerator, model, optimizer = prepared("ddp", option, model=model)
        keep = model.inner.last.weight.register_post_accumulate_grad_hook
        keep(lambda parameter: seen.append(parameter.grad.clone()))
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        for batch, model.fits in enumerate(limits):
            mine = rows_of(batch, accelerator.process_index)
            accelerator.backward_in_pieces(mine, squares(model))
        if option == "auto":
            assert model.errors == accelerator.process_index
        gradients = [each.grad.clone() for each in model.parameters()]
        optimizer.zero_grad()
        accelerator.free_memory()
    torch.testing.assert_close(seen[-1], seen[0], rtol=1e-12, atol=1e-12)
    for each in alone.parameters():
        each.grad = torch.ones_like(each)
    window = [rows_of(batch, rank) for batch in range(2) for rank in range(2)]
    alone(torch.cat(window)).square().mean().backward()
    for ours, gradient in zip(alone.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, ours.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [{"name": "zero3", "keep_below": 1}, {"name": "fsdp"}])
@pytest.mark.ranks(2)
def test_the_error_leaves_where_ranks_need_each_other_in_a_forward(strategy):
    model = Shortage(Tower(), ranks=(0, 1))
    accelerator, model, _ = prepared(strategy, model=model)
    model.fits = 4
    with pytest.raises(torch.OutOfMemoryError):
        accelerator.backward_in_pieces(rows_of(0, accelerator.process_index), squares(model))
    accelerator.free_memory()


def test_the_error_leaves_where_pieces_are_told_or_cannot_be_smaller():
    for option, fits in (("whole", 4), (6, 4), ("auto", 0)):
        accelerator, model, _ = prepared(
            "ddp", option, model=Shortage(Tower(), ranks=(0,)), windows=1
        )
        model.fits = fits
        with pytest.raises(torch.OutOfMemoryError):
            accelerator.backward_in_pieces(rows_of(0, 0), squares(model))
        accelerator.free_memory()


def test_weights_count_and_the_report_tells_the_loss_of_the_pieces_that_count():
    alone = Tower()
    accelerator, model, optimizer = prepared(
        "zero3", model=Shortage(copy.deepcopy(alone), ranks=(0,)), windows=1
    )
    figures = []
    accelerator.report.listen(figures.append)
    model.fits = 4
    rows, counted = rows_of(0, 0), torch.tensor([1, 0, 0, 0, 0, 1, 1, 0, 1])

    def compute(part):
        losses, weight = model(part["rows"]).square().mean(-1), int(part["counted"].sum())
        return (losses * part["counted"]).sum() / weight, weight

    loss = accelerator.backward_in_pieces({"rows": rows, "counted": counted}, compute)
    optimizer.step()
    optimizer.zero_grad()
    assert model.taken == [1, 8, 3, 3, 3]
    expected = alone(rows).square().mean(-1)[counted.bool()].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    expected.backward()
    ours = torch.optim.SGD(alone.parameters(), lr=0.1)
    ours.step()
    found = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[f"inner.{name}"], value, rtol=1e-12, atol=1e-12)
    accelerator.end_training()
    assert figures[0].loss == pytest.approx(expected.item())


class Deep(nn.Module):
    """Keeps 10 MiB of a row for backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = x * self.scale
        for _ in range(20):
            x = torch.sigmoid(x)
        return x.mean()


def long_rows(batch):
    return torch.randn(16, 1 << 17, generator=torch.Generator().manual_seed(batch))


@pytest.mark.ranks(2)
def test_a_rank_whose_allocator_fails_frees_what_it_held(monkeypatch):
    """One rank may take 120 MiB more, of 160 that a batch keeps; it is predicted that all fits."""
    monkeypatch.setattr(pieces, "_room", lambda device, ranks: 2**50)
    accelerator = Accelerator(strategy="ddp", cpu=True, config={"micro_batch": "auto"})
    model, rank = accelerator.prepare(Deep()), accelerator.process_index
    _, most = limits = resource.getrlimit(resource.RLIMIT_AS)
    counts = [[], [], []]

    def compute(part):
        counts[batch].append(len(part))
        return model(part)

    try:
        for batch in range(3):
            rows = long_rows(batch)
            held = psutil.Process().memory_info().vms
            if rank:
                resource.setrlimit(resource.RLIMIT_AS, (held + (120 << 20), most))
            accelerator.backward_in_pieces(rows, compute)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    first, second, third = counts
    assert first[:2] == [1, 15]
    assert len(first) > 2
    assert 1 <= max(third) <= max(second) <= 8
    (gradient,) = (each.grad for each in model.parameters())
    alone = Deep()
    for batch in range(3):
        alone(long_rows(batch)).backward()
    torch.testing.assert_close(gradient, alone.scale.grad)
    accelerator.free_memory()
