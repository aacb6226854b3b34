"""Training with state in stores equals the same strategy without them, to the last bit."""

import itertools

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from drivetrain import Accelerator
from drivetrain.errors import ConfigError, PreflightError, UsageError
from offloaded_trainings import (
    STRATEGIES,
    Free,
    Net,
    Training,
    adamw,
    assert_same,
    loss_of,
    offloads,
)

MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}


def with_masters(name):
    return {**MASTERS, "model": Net if name.startswith(("zero3", "fsdp")) else Free}


@pytest.mark.parametrize("name", ["zero1", "zero2 parameter", "fsdp grad"])
@pytest.mark.ranks(2)
def test_bits_are_those_without(name, tmp_path):
    """In fp32 and windows; with masters see the checkpoints."""
    expected = Training(STRATEGIES[name], window=2).steps(3, clip=0.3).close()
    for offload in offloads(name, str(tmp_path)):
        strategy = {**STRATEGIES[name], "offload": offload}
        assert_same(Training(strategy, window=2).steps(3, clip=0.3).close(), expected)


OPTIMIZERS = {
    "plain sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "adagrad": lambda model: Adagrad(model.parameters(), initial_accumulator_value=0.1),
    "amsgrad": lambda model: adamw(model, amsgrad=True),
    "loop": lambda model: adamw(model, fused=False),
    "rmsprop": lambda model: RMSprop(model.parameters()),
}


@pytest.mark.ranks(2)
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
@pytest.mark.ranks(2)
def test_loops(name, tmp_path):
    """No clearing at all, clearing to zero, and gradients added after they were clipped."""

    def run(offload):
        training = Training(STRATEGIES[name] | ({"offload": offload} if offload else {}))
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

    expected = run(None)
    for offload in offloads(name, str(tmp_path)):
        assert_same(run(offload), expected)


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
@pytest.mark.ranks(2)
def test_checkpoints_go_between_all(name, tmp_path):
    """What one of them saves, any of them loads, and goes on bit by bit."""
    strategy, options = STRATEGIES[name], with_masters(name)
    kinds = [None, *offloads(name, str(tmp_path))]
    whole = Training(strategy, **options).steps(6, clip=0.3).close()
    for number, (saved, loaded) in enumerate(itertools.pairwise([*kinds, None])):
        directory = tmp_path / f"state-{number}"
        first = Training(under(strategy, saved), **options).steps(3, clip=0.3)
        first.accelerator.save_state(str(directory))
        first.accelerator.free_memory()
        second = Training(under(strategy, loaded), **options)
        second.accelerator.load_state(str(directory))
        second.losses = first.losses
        second.steps(3, first=3, clip=0.3)
        assert_same(second.close(), whole)


def under(strategy, offload):
    return strategy if offload is None else {**strategy, "offload": offload}


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_state_dicts_of_optimizers_go_in_and_out(tmp_path):
    for offload in offloads("zero3", str(tmp_path)):
        strategy = under(STRATEGIES["zero3"], offload)
        expected = Training(strategy, **MASTERS).steps(4)
        first = Training(strategy, **MASTERS).steps(4)
        state = first.optimizer.state_dict()
        state = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state
        )
        first.steps(1, first=50)
        assert_differ(first.found(), expected.found())
        weights = expected.accelerator.get_state_dict(expected.model)
        with first.accelerator.strategy_of(first.model).gathered(list(first.model.parameters())):
            first.model.load_state_dict(weights)
        first.optimizer.load_state_dict(state)
        found, wanted = first.optimizer.state_dict(), expected.optimizer.state_dict()
        for number, kept in wanted["state"].items():
            for key, value in kept.items():
                assert torch.equal(value, found["state"][number][key])
        first.accelerator.free_memory()
        expected.accelerator.free_memory()


def assert_differ(one, other):
    assert any(not torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.ranks(2)
def test_late_updates(tmp_path):
    """Forward reads what the step before the last one made; checkpoints have the last one, too."""
    for offload in offloads("zero3", str(tmp_path)):
        strategy = under(STRATEGIES["zero3"], {**offload, "ratio": 1.0, "delayed": True})
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
        training.accelerator.free_memory()
        subtract(plain, waiting)
        loaded = Training(STRATEGIES["zero3"], make=lambda model: SGD(model.parameters(), lr=0.1))
        loaded.accelerator.load_state(directory)
        assert_weights(loaded, plain)
        loaded.accelerator.free_memory()


def assert_weights(training, plain):
    weights = training.accelerator.get_state_dict(training.model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def subtract(model, updates):
    for name, update in updates.items():
        model.get_parameter(name).sub_(update)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_thawed_later(tmp_path):
    def run(offload):
        training = Training(under(STRATEGIES["zero3"], offload))
        training.steps(2)
        frozen = training.model.frozen
        frozen.requires_grad_(True)
        training.optimizer.add_param_group({"params": list(frozen.parameters())})
        training.steps(3, first=2, clip=0.3)
        return training.close()

    expected = run(None)
    for offload in offloads("zero3", str(tmp_path)):
        assert_same(run(offload), expected)


@pytest.mark.ranks(2)
def test_two_optimizers(tmp_path):
    def run(offload):
        accelerator = Accelerator(strategy=under(STRATEGIES["fsdp"], offload), cpu=True)
        torch.manual_seed(5)
        model = Net()
        one = AdamW(model.blocks.parameters(), lr=1e-2)
        model = accelerator.prepare(model)
        one = accelerator.prepare(one)
        two = accelerator.prepare(SGD([model.words.weight, model.scale], lr=0.1))
        losses = []
        for seed in range(4):
            loss = loss_of(model, seed)
            losses.append(loss.item())
            accelerator.backward(loss)
            one.step()
            if seed % 2:
                two.step()
                two.zero_grad()
            one.zero_grad()
        found = losses, accelerator.get_state_dict(model), one.state_dict()["state"]
        accelerator.free_memory()
        return found

    expected = run(None)
    for offload in offloads("fsdp", str(tmp_path)):
        assert_same(run(offload), expected)


@pytest.mark.ranks(2)
def test_fp16_scaling_and_skipped_steps(tmp_path):
    def run(offload):
        training = Training(
            under(STRATEGIES["zero3"], offload),
            mixed_precision="fp16",
            config={"dtypes": {"param": "fp16"}},
        )
        training.steps(4, clip=0.3)
        return training.close()

    expected = run(None)
    for offload in offloads("zero3", str(tmp_path)):
        assert_same(run(offload), expected)


@pytest.mark.ranks(2)
def test_what_is_refused(tmp_path):
    disk = {"optimizer": "nvme", "path": str(tmp_path)}
    training = Training(under(STRATEGIES["zero3"], {**disk, "params": "nvme"}))
    training.micro(0)
    with pytest.raises(UsageError, match="without a closure"):
        training.optimizer.step(lambda: 0.0)
    held = training.optimizer.param_groups[0]["params"][0]
    with pytest.raises(UsageError, match="a store keeps them"):
        held.norm()
    assert "values elsewhere" in repr(held)
    training.accelerator.free_memory()
    for options, error, text in (
        ({"optimizer": "nope"}, ConfigError, "unknown store 'nope'"),
        ({"optimizer": "device"}, ConfigError, "keeps tensors"),
        ({"optimizer": "cpu", "store_options": {"nope": 1}}, ConfigError, "options of the stores"),
        ({"optimizer": "nvme"}, ConfigError, "path"),
        ({**disk, "path": str(tmp_path / "nope")}, PreflightError, "nope"),
        ({"path": str(tmp_path)}, ConfigError, "expected a store in offload.optimizer"),
        ({"params": "cpu"}, ConfigError, "expected offload.optimizer"),
    ):
        with pytest.raises(error, match=text):
            Training(under(STRATEGIES["zero3"], options))
