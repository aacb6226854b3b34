"""Windows: cleared at any place, left out, interrupted, with losses that count nothing."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from way_kit import LENGTH, ROWS, WORDS, Loop

STEPS = 4
"""Micro-batches of a window."""


def _windows(loop: Loop, windows: int = 3) -> Iterator[tuple[int, int]]:
    for window in range(windows):
        for micro in range(STEPS):
            yield window, micro


def _loss(loop: Loop, model: nn.Module, batch: Tensor) -> Tensor:
    return loop.loss(model, batch) / (STEPS if loop.alone else 1)


def _cleared(loop: Loop, first: Callable[[nn.Module, Optimizer], object], *, last: bool) -> None:
    """Train windows that are cleared first, or last, in each micro-batch."""
    loop.begin(gradient_accumulation_steps=STEPS)
    model, optimizer = loop.ready(lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    for window, micro in _windows(loop):
        with loop.accumulate(model):
            if loop.alone and micro == 0:
                optimizer.zero_grad()
            if not loop.alone and not last:
                first(model, optimizer)
            loop.backward(_loss(loop, model, loop.batch(STEPS * window + micro)))
            if not loop.alone or micro == STEPS - 1:
                optimizer.step()
            if not loop.alone and last:
                first(model, optimizer)
    loop.weights(model)


def the_optimizer_clears_first_in_each_micro_batch(loop: Loop) -> None:
    _cleared(loop, lambda model, optimizer: optimizer.zero_grad(), last=False)


def the_model_clears_first_in_each_micro_batch(loop: Loop) -> None:
    _cleared(loop, lambda model, optimizer: model.zero_grad(set_to_none=False), last=False)


def the_model_clears_last_in_each_micro_batch(loop: Loop) -> None:
    _cleared(loop, lambda model, optimizer: model.zero_grad(), last=True)


def a_window_is_cleared_in_place_of_its_step(loop: Loop) -> None:
    """As where a loss has exploded."""
    loop.begin(gradient_accumulation_steps=STEPS)
    model, optimizer = loop.ready()
    for window, micro in _windows(loop):
        with loop.accumulate(model):
            loop.backward(_loss(loop, model, loop.batch(STEPS * window + micro)))
            if window == 1 and micro == STEPS - 1:
                optimizer.zero_grad()
                continue
            if not loop.alone or micro == STEPS - 1:
                optimizer.step()
                optimizer.zero_grad()
    loop.weights(model)


def _weighted(loop: Loop, masks: Callable[[int, int], Tensor]) -> None:
    """Train windows of masked means, whose weight may be 0 on a rank: then they are no numbers."""
    loop.begin(gradient_accumulation_steps=STEPS)
    model, optimizer = loop.ready()
    for window in range(3):
        sums, tokens = [], 0.0
        for micro in range(STEPS):
            batch = loop.batch(STEPS * window + micro)
            mask = loop.part(masks(window, micro)[:, None].expand(ROWS, LENGTH)).flatten()
            with loop.accumulate(model):
                scores = model(batch).flatten(0, 1)
                each = nn.functional.cross_entropy(scores, batch.flatten(), reduction="none")
                if loop.alone:
                    sums.append((each * mask).sum())
                    tokens += float(mask.sum())
                    continue
                loop.step(optimizer, (each * mask).sum() / mask.sum(), weight=mask.sum())
        if tokens:
            (sum(sums) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    loop.weights(model)


def a_loss_counts_nothing_on_one_rank(loop: Loop) -> None:
    """All labels of a rank are padding: its masked mean is 0 / 0, and so is its graph."""
    _weighted(loop, lambda window, micro: (torch.arange(ROWS) >= ROWS // 2 * (micro % 2)).double())


def a_window_is_given_up_and_cleared(loop: Loop) -> None:
    """As where a micro-batch is too long for the memory."""
    loop.begin(gradient_accumulation_steps=STEPS)
    model, optimizer = loop.ready(lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    for window, micro in _windows(loop):
        if window == 1 and micro >= 2:
            continue
        with loop.accumulate(model):
            loop.backward(_loss(loop, model, loop.batch(STEPS * window + micro)))
            if not loop.alone or micro == STEPS - 1:
                optimizer.step()
                optimizer.zero_grad()
        if window == 1 and micro == 1:
            if not loop.alone:
                loop.accelerator.gradient_state.sync_gradients = True
            optimizer.zero_grad()
    loop.weights(model)


def a_loss_counts_nothing_on_all_ranks(loop: Loop) -> None:
    _weighted(loop, lambda window, micro: torch.full((ROWS,), float(micro > 0)))


def all_losses_of_a_window_count_nothing(loop: Loop) -> None:
    _weighted(loop, lambda window, micro: torch.full((ROWS,), float(window != 1)))


def a_mean_counts_nothing_on_one_rank(loop: Loop) -> None:
    loop.begin()
    loop.ready()
    mask = loop.part((torch.arange(ROWS) >= ROWS // 2).double())
    values = loop.part(torch.arange(ROWS).double())
    mean, count = (values * mask).sum() / mask.sum(), int(mask.sum())
    loop.note("mean", mean if loop.alone else loop.accelerator.metric_mean(mean, count))


def _interrupted(loop: Loop, stop: int, loaders: int) -> None:
    """Train an epoch; save before its end, go on from there with new objects."""
    rows = torch.randint(0, WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(1))

    def made() -> tuple[nn.Module, Optimizer, list[DataLoader[Tensor]]]:
        loop.begin(gradient_accumulation_steps=STEPS)
        split = 1 if loop.alone else loop.accelerator.mesh["dp"].size
        data = [DataLoader(part, batch_size=4 // split) for part in rows.chunk(loaders)]
        model, optimizer, *prepared = loop.prepare(
            model := loop.model(), SGD(model.parameters(), lr=0.5, momentum=0.9), *data
        )
        return model, optimizer, prepared

    model, optimizer, data = made()
    folder = None if loop.alone else loop.folder() / "checkpoint"
    done = 0
    for resumed in (False, True):
        if resumed and not loop.alone:
            loop.accelerator.free_memory()
            model, optimizer, data = made()
            loop.accelerator.load_state(folder)
        elif resumed:
            break
        for batches in zip(*data, strict=True):
            with loop.accumulate(model):
                for batch in batches:
                    loop.backward(_loss(loop, model, batch))
                done += 1
                if not loop.alone or done % STEPS == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if done == stop and not (loop.alone or resumed):
                loop.accelerator.save_state(folder)
                break
    loop.weights(model)


def a_run_goes_on_from_inside_a_window(loop: Loop) -> None:
    _interrupted(loop, stop=STEPS + 2, loaders=1)


def a_run_goes_on_from_inside_its_first_window_with_two_loaders(loop: Loop) -> None:
    _interrupted(loop, stop=2, loaders=2)
