"""Local steps with state in stores inside of workers: the bits of the same run without stores."""

from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW

from drivetrain import Accelerator, ConfigError
from local_trainings import Training, hosts, local
from local_workers import Blocks, Rounds, loss_of
from resumed_workers import check_same_bits, goes_on_bit_for_bit

pytestmark = pytest.mark.ranks(2)

STREAMING = Rounds(every=4, fragments=2, delay=3, keep=0.5)
INNERS = ["zero1", "offload", "zero3", "part", "fsdp", "megatron"]
ROUNDS = {
    "streaming": STREAMING,
    "all at once": Rounds(every=3),
    "after a warm-up": replace(STREAMING, warmup_steps=3),
}


def stored(name, folder):
    """Return a strategy inside without stores, and the same one with stores."""
    folder.mkdir(exist_ok=True)
    disk = {"optimizer": "nvme", "path": str(folder)}
    return {
        "zero1": ("zero1", {"name": "zero1", "offload": {"optimizer": "cpu"}}),
        "offload": ("zero2", {"name": "offload", **disk}),
        "zero3": ("zero3", {"name": "zero3", "offload": {**disk, "params": "nvme"}}),
        "part": ("fsdp", {"name": "fsdp", "offload": {"optimizer": "cpu", "ratio": 0.5}}),
        "fsdp": ("fsdp", {"name": "fsdp", "offload": {**disk, "params": "nvme"}}),
        "megatron": tuple(
            {"name": "megatron", "data_parallel": each}
            for each in ("zero1", {"name": "zero1", "offload": {"optimizer": "cpu"}})
        ),
    }[name]


class Stored(Training):
    """A training under some strategy inside of ``local``."""

    def __init__(self, inner, rounds, workers="ranks", model=None, *, clip=0.5, **options):
        super().__init__(local(rounds, inner, workers), model, make=trained_adamw, **options)
        self.clip = clip

    def run(self, first, last):
        dtype = next(self.model.parameters()).dtype
        loss = lambda model, inputs: loss_of(model, inputs.to(dtype))  # noqa: E731
        return super().run(first, last, clip=self.clip, loss=loss)

    def own(self):
        with self.strategy.state.gathered(list(self.model.parameters()), modify=False):
            return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def trained_adamw(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def same_bits(trainings, steps=9):
    """Check that trainings have the same weights after each step, outer ones and their own."""
    for step in range(steps):
        for training in trainings:
            training.run(step, step + 1)
        (outer, own), *others = [(each.outer(), each.own()) for each in trainings]
        for found, mine in others:
            check_same_bits(found, outer)
            check_same_bits(mine, own)


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
@pytest.mark.parametrize("inner", INNERS)
def test_stores_change_no_bit(tmp_path, inner, rounds):
    same_bits([Stored(each, rounds) for each in stored(inner, tmp_path)])


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["fsdp", "offload", "zero1"])
def test_stores_of_workers_of_two_ranks(monkeypatch, tmp_path, inner):
    hosts(monkeypatch)
    same_bits([Stored(each, STREAMING, "hosts") for each in stored(inner, tmp_path)], steps=7)


class Skips(Blocks):
    """The second worker does not use the last layer, nor the blocks."""

    def forward(self, inputs):
        used = super().forward(inputs)
        return inputs[:, :3] * self.first.weight.sum() if torch.distributed.get_rank() else used


@pytest.mark.parametrize(("inner", "model"), [("offload", Skips), ("fsdp", Blocks)])
def test_masters_in_stores(tmp_path, inner, model):
    """Outer steps read and write masters, whose last digits forward never sees.

    A placeholder has the dtype of its gradient at times, and a worker may lack the gradient.
    """
    options = {"precision": "bf16", "dtypes": {"param": "bf16"}, "on_nonfinite": "ignore"}
    rounds = Rounds(every=2, fragments=2, delay=1)
    trainings = [
        Stored(each, rounds, model=model().float(), clip=None, **options)
        for each in stored(inner, tmp_path)
    ]
    same_bits(trainings, steps=5)


@pytest.mark.parametrize("inner", ["offload", "fsdp"])
def test_masters_go_on_bit_for_bit(tmp_path, inner):
    options = {"precision": "bf16", "dtypes": {"param": "bf16"}}
    _, beside = stored(inner, tmp_path / "stores")

    def make():
        return Stored(beside, STREAMING, model=Blocks().float(), **options)

    goes_on_bit_for_bit(str(tmp_path / "checkpoint"), make)


@pytest.mark.parametrize("inner", INNERS)
def test_a_round_goes_on_bit_for_bit(tmp_path, inner):
    _, beside = stored(inner, tmp_path / "stores")
    goes_on_bit_for_bit(str(tmp_path / "checkpoint"), lambda: Stored(beside, STREAMING))


@pytest.mark.parametrize("back", [False, True], ids=["into stores", "out of stores"])
def test_a_checkpoint_goes_on_with_and_without_stores(tmp_path, back):
    inners = stored("offload", tmp_path / "stores")
    first, second = (Stored(each, STREAMING) for each in (inners[::-1] if back else inners))
    first.run(0, 6)
    first.accelerator.save_state(str(tmp_path / "checkpoint"))
    second.accelerator.load_state(str(tmp_path / "checkpoint"))
    for training in (first, second):
        training.run(6, 10)
    check_same_bits(second.outer(), first.outer())
    check_same_bits(second.own(), first.own())


def test_kept_errors_and_changed_weights(tmp_path):
    """Exchanges by int4 keep errors; the script sets a weight, which outer weights follow."""
    trainings = [
        Stored(each, Rounds(every=2), model=Blocks().float(), links={"gradients": "int4"})
        for each in stored("offload", tmp_path)
    ]
    for training in trainings:
        training.run(0, 3)
        with training.accelerator.gathered(training.model):
            training.model.last.bias.data.fill_(3.0)
        assert training.outer()["last.bias"].tolist() == [3.0] * 3
    same_bits(trainings, steps=4)


@pytest.mark.parametrize("inner", ["offload", "fsdp"])
def test_a_param_group_that_comes_later(tmp_path, inner):
    """A store steps its parameters from the first step on: outer weights are those before it."""

    def thawing():
        model = Blocks()
        model.last.requires_grad_(False)
        return model

    trainings = [Stored(e, Rounds(every=2), model=thawing()) for e in stored(inner, tmp_path)]
    for training in trainings:
        training.run(0, 3)
        training.model.last.requires_grad_(True)
        training.optimizer.add_param_group({"params": [*training.model.last.parameters()]})
    same_bits(trainings, steps=4)


@pytest.mark.parametrize("inner", ["fsdp", "zero1"])
def test_a_gradient_that_one_worker_lacks_in_the_warm_up(tmp_path, inner):
    rounds = Rounds(every=2, warmup_steps=3)
    same_bits([Stored(e, rounds, model=Skips()) for e in stored(inner, tmp_path)], steps=5)


@pytest.mark.ranks(1)
def test_steps_that_come_late_are_refused():
    late = {"optimizer": "cpu", "delayed": True}
    for nested in (
        {"name": "offload", **late},
        {"name": "megatron", "data_parallel": {"name": "zero1", "offload": late}},
    ):
        config = {"strategy": {"name": "local", "inner": nested}}
        with pytest.raises(ConfigError, match=r"strategy\.inner: .*delayed: true.* leave delayed"):
            Accelerator(config=config, cpu=True)
