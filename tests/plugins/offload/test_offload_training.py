"""Training with state in stores equals the same strategy without them, to the last bit."""

import errno
import itertools
import os
import pkgutil
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.optim import SGD, Adagrad, RMSprop

from drivetrain.errors import CheckpointError, ConfigError, PreflightError, StorageError, UsageError
from offloaded_trainings import (
    STRATEGIES,
    Free,
    Net,
    Training,
    adamw,
    assert_same,
    loss_of,
    offloads,
)  # fmt: skip
from zero_stages import MASTERS

pytestmark = pytest.mark.ranks(2)


def under(name, offload):
    strategy = STRATEGIES[name]
    return strategy if offload is None else {**strategy, "offload": offload}


def check_each(name, path, run, *, of=1):
    """Compare a run with each kind of offload, or one of several, with the run without."""
    expected = run(STRATEGIES[name])
    for offload in list(offloads(name, str(path)))[of - 1 :: of]:
        assert_same(run(under(name, offload)), expected)


@pytest.mark.parametrize("name", ["zero2 parameter", "fsdp grad"])
def test_bits_are_those_without(name, tmp_path):
    """In fp32 and windows; with masters see the checkpoints."""
    check_each(name, tmp_path, lambda how: Training(how, window=2).steps(3, clip=0.3).close())


OPTIMIZERS = {
    "plain sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "adagrad": lambda model: Adagrad(model.parameters(), initial_accumulator_value=0.1),
    "amsgrad": lambda model: adamw(model, amsgrad=True),
    "loop": lambda model: adamw(model, fused=False),
    "rmsprop": lambda model: RMSprop(model.parameters()),
}


def test_optimizers(tmp_path):
    for kind, make in OPTIMIZERS.items():
        expected = Training("zero2", make=make).steps(3).close()
        for offload in offloads("zero2", str(tmp_path)):
            strategy = {"name": "zero2", "offload": offload}
            if kind == "rmsprop" and offload["optimizer"] == "nvme":
                with pytest.raises(UsageError, match="expected an optimizer that the store 'nvme'"):
                    Training(strategy, make=make)
                continue
            assert_same(Training(strategy, make=make).steps(3).close(), expected)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_loops(name, tmp_path):
    """No clearing at all, clearing to zero, and gradients added after they were clipped."""

    def run(strategy):
        training = Training(strategy)
        training.steps(2, to_none=False)
        accelerator, model, optimizer = training.accelerator, training.model, training.optimizer
        for seed in range(3):  # torch adds to the gradients of the step before
            accelerator.backward(loss_of(model, seed))
            optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, 3))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        accelerator.backward(loss_of(model, 4))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            training.losses.append(loss_of(model, 9).item())
        return training.close()

    check_each(name, tmp_path, run, of=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_checkpoints_go_between_all(name, tmp_path):
    """What one of them saves, any of them loads, and goes on bit by bit."""
    options = {**MASTERS, "model": Free if name == "zero2" else Net}
    kinds = [None, *offloads(name, str(tmp_path))][:: 1 if name == "zero2" else 2]
    whole = Training(STRATEGIES[name], **options).steps(4, clip=0.3).close()
    for number, (saved, loaded) in enumerate(itertools.pairwise([*kinds, None])):
        directory = tmp_path / f"state-{number}"
        first = Training(under(name, saved), **options).steps(2, clip=0.3)
        first.accelerator.save_state(str(directory))
        second = Training(under(name, loaded), **options)
        second.accelerator.load_state(str(directory))
        second.losses = first.losses
        second.steps(2, first=2, clip=0.3)
        assert_same(second.close(), whole)


def test_late_updates(tmp_path):
    """Forward reads what the step before the last one made; checkpoints have the last one, too."""
    for offload in list(offloads("zero3", str(tmp_path)))[::2]:
        strategy = under("zero3", {**offload, "ratio": 1.0, "delayed": True})
        training = Training(strategy, make=lambda model: SGD(model.parameters(), lr=0.1))
        torch.manual_seed(5)
        plain = Net()
        waiting = {}
        for seed in range(4):
            lr = training.optimizer.param_groups[0]["lr"]
            training.micro(seed)
            losses = [loss_of(plain, 100 * seed + rank) for rank in range(2)]
            mine = losses[training.accelerator.process_index].item()
            assert training.losses[-1] == pytest.approx(mine, rel=1e-5)
            plain.zero_grad()
            (sum(losses) / 2).backward()
            subtract(plain, waiting)
            waiting = {n: lr * p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert_weights(training, plain)
        directory = str(tmp_path / "-".join(map(str, offload.values())).replace("/", "-"))
        training.accelerator.save_state(directory)
        subtract(plain, waiting)
        loaded = Training(STRATEGIES["zero3"], make=lambda model: SGD(model.parameters(), lr=0.1))
        loaded.accelerator.load_state(directory)
        assert_weights(loaded, plain)


def assert_weights(training, plain):
    weights = training.accelerator.get_state_dict(training.model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def subtract(model, updates):
    for name, update in updates.items():
        model.get_parameter(name).sub_(update)


def test_fp16_scaling_and_skipped_steps(tmp_path):
    half = {"mixed_precision": "fp16", "config": {"dtypes": {"param": "fp16"}}}
    check_each(
        "zero3", tmp_path, lambda how: Training(how, **half).steps(4, clip=0.3).close(), of=2
    )


def test_what_is_refused(tmp_path):
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    training = Training(under("zero3", {**disk, "params": "nvme"}))
    training.micro(0)
    with pytest.raises(UsageError, match="without a closure"):
        training.optimizer.step(lambda: 0.0)
    held = training.optimizer.optimizer.param_groups[0]["params"][0]
    with pytest.raises(UsageError, match="a store keeps them"):
        held.norm()
    assert "values elsewhere" in repr(held)
    for options, error, text in (
        ({"optimizer": "nope"}, ConfigError, "unknown store 'nope'"),
        ({"optimizer": "cpu", "store_options": {"nope": 1}}, ConfigError, "options of the stores"),
        ({"optimizer": "nvme"}, ConfigError, "path"),
        ({**disk, "path": str(tmp_path / "nope")}, PreflightError, "nope"),
        ({"path": str(tmp_path)}, ConfigError, "expected a store in offload.optimizer"),
        ({"params": "cpu"}, ConfigError, "expected offload.optimizer"),
    ):
        with pytest.raises(error, match=text):
            Training(under("zero3", options))


# --- disks that fail and steps that are interrupted ---


STORES = {
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp, parameters": ("fsdp", {"params": "nvme"}),
    "fsdp, late": ("fsdp", {"delayed": True}),
}


def started(which, path):
    name, offload = STORES[which]
    offload = {"optimizer": "nvme", "path": str(path), **offload}
    return Training({**STRATEGIES[name], "offload": offload})


def broken(call):
    """Let system calls of this process fail: ``preadv`` or ``pwritev``."""

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return mock.patch.object(os, call, fail)


@pytest.mark.ranks(1)
def test_a_disk_that_fails_ends_the_only_rank(tmp_path):
    for which, call in (
        ("zero2", "preadv"),
        ("fsdp, parameters", "preadv"),
        ("fsdp, late", "pwritev"),
    ):
        training = started(which, tmp_path).steps(2)
        with broken(call), pytest.raises(StorageError, match=str(tmp_path)):
            training.steps(6)


@pytest.mark.parametrize("which", ["zero2", "fsdp, late"])
def test_a_save_that_cannot_read_is_not_committed(which, tmp_path):
    training = started(which, tmp_path).steps(2)
    save = training.accelerator.save_state
    save(str(tmp_path / "earlier"))
    training.optimizer.state_dict()  # lets the step end
    for wait in (True, False):
        disk = broken("preadv") if training.accelerator.process_index == 1 else nullcontext()
        with disk, pytest.raises(CheckpointError, match=r"EIO.*look at the disk"):
            save(str(tmp_path / "later"), wait=wait)
        training.accelerator.wait_for_everyone()
        assert {path.name for path in tmp_path.iterdir()} == {"earlier"}
    training.accelerator.load_state(str(tmp_path / "earlier"))  # the disk reads again
    training.steps(1)


PLACES = (
    "torch.nn.Linear.forward",
    "drivetrain_offload.strategy.OffloadEngine._step_of",
    "drivetrain_offload.stepping.Stepper.submit",
    "drivetrain_offload.strategy.OffloadEngine.give_back",
)


@pytest.mark.parametrize("which", ["zero3", "fsdp, late"])
def test_an_interrupted_step_does_not_spoil_the_next(which, tmp_path):
    """On all ranks at the same place; then the checkpoint before gives the very same steps."""
    training = started(which, tmp_path).steps(2)
    training.accelerator.save_state(str(tmp_path / "state"))

    def again():
        training.accelerator.load_state(str(tmp_path / "state"))
        training.losses = []
        return list(training.steps(2, first=2).losses)

    expected = again()
    for place in PLACES:
        with interrupted(place), pytest.raises(KeyboardInterrupt):
            training.steps(2, first=4)
        training.optimizer.zero_grad()
        training.micro(6)
        assert again() == expected, place


@contextmanager
def interrupted(place):
    """Raise in the place of a function, after one real call."""
    owner, name = place.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    real, calls = getattr(owner, name), itertools.count()

    def call(*args, **kwargs):
        if next(calls):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield
