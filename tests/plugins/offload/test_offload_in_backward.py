"""Updates that begin in backward: the same bits, and nothing changes until the step."""

import math
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain import Accelerator
from drivetrain.errors import ConfigError, UsageError
from drivetrain_offload.tiles import Tiler
from offloaded_trainings import STRATEGIES, Free, Net, Training, assert_same, loss_of, offloads
from waits import PATIENCE_S
from zero_stages import MASTERS, start

pytestmark = pytest.mark.ranks(2)

EARLY = {"optimizer": "cpu", "in_backward": True}


def check_bits(name, path, run):
    """Compare stores that begin in backward with one that does not."""
    late = {"optimizer": "cpu"}
    expected = run({**STRATEGIES[name], "offload": late})
    for offload in list(offloads(name, path))[:: 1 if name == "zero3" else 2]:
        assert_same(
            run({**STRATEGIES[name], "offload": {**offload, "in_backward": True}}), expected
        )


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
def test_bits_are_those_of_steps_that_begin_later(name, tmp_path):
    """In windows, with masters, and with weighted losses, whose factor is known before backward."""
    model = Free if name == "zero2" else Net

    def run(strategy):
        training = Training(strategy, model=model, window=2, **MASTERS).steps(2)
        for micro in range(4):
            with training.accelerator.accumulate(training.model):
                rank = training.accelerator.process_index
                loss = loss_of(training.model, 10 * micro + rank)
                training.accelerator.backward(loss, weight=1.0 + micro + rank)
                training.optimizer.step()
                training.optimizer.zero_grad()
        return training.close()

    check_bits(name, str(tmp_path), run)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_gradients_of_low_dtypes_are_multiplied_in_that_of_sums(name):
    """By the factor of weights, before an update begins, and by a script, after a step."""
    low = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16", "reduce": "bf16"}}}
    found = []
    for offload in ({"optimizer": "cpu"}, EARLY):
        training = Training({**STRATEGIES[name], "offload": offload}, model=Free, **low)
        rank = training.accelerator.process_index
        for seed in range(4):
            weight = {"weight": 1.37 + rank} if seed < 2 else {}
            training.accelerator.backward(loss_of(training.model, seed), **weight)
            given = [p.grad for p in training.model.parameters() if p.grad is not None]
            training.losses += [float(grad.norm()) for grad in given]
            training.optimizer.step()
            if seed < 2:
                training.optimizer.zero_grad()
            else:
                for grad in given:
                    grad.mul_(0.3)
        found.append(training.close())
    assert_same(*found)


def test_updates_begin_in_backward_and_show_at_the_step(monkeypatch):
    """The first block's backward waits for the update of the last; weights change at the step."""
    training = Training({**STRATEGIES["fsdp"], "offload": EARLY}, model=Free)
    training.steps(1)
    blocks = training.model.blocks
    updated = threading.Event()
    real = Tiler.update_all

    def update_all(tiler, pieces):
        real(tiler, pieces)
        if pieces:
            updated.set()

    monkeypatch.setattr(Tiler, "update_all", update_all)
    seen = []
    hook = blocks[0].register_full_backward_hook(lambda *_: seen.append(updated.wait(PATIENCE_S)))
    before = training.accelerator.get_state_dict(training.model)
    training.accelerator.backward(loss_of(training.model, 7))
    hook.remove()
    assert seen == [True]
    shown = training.accelerator.get_state_dict(training.model)
    assert all(torch.equal(before[name], value) for name, value in shown.items())
    training.optimizer.step()
    after = training.accelerator.get_state_dict(training.model)
    assert not torch.equal(after["last.weight"], before["last.weight"])


def change_rate(training):
    training.optimizer.param_groups[0]["lr"] = 0.5
    training.optimizer.step()


def double(training):
    first = training.model.first.weight.grad
    first.mul_(2)


def write(training):
    with torch.no_grad():
        training.model.first.weight.mul_(2)
    training.optimizer.step()


CHANGES = {
    "another backward": lambda training: training.accelerator.backward(loss_of(training.model, 8)),
    "gradients that are cleared": lambda training: training.optimizer.zero_grad(),
    "gradients that are clipped": lambda training: training.accelerator.clip_grad_norm_(
        training.model.parameters(), 1.0
    ),
    "gradients that are changed": double,
    "other options of param groups": change_rate,
    "a use of the optimizer's state": lambda training: training.optimizer.state_dict(),
    r"gathered\(\)": lambda training: training.accelerator.gathered(training.model).__enter__(),
    "parameters that are changed": write,
}


def test_nothing_may_change_before_the_step():
    for found, change in CHANGES.items():
        training = Training({**STRATEGIES["zero2"], "offload": EARLY}, model=Free)
        training.accelerator.backward(loss_of(training.model, 7))
        with pytest.raises(UsageError, match=rf"expected optimizer.step\(\).*found {found}"):
            change(training)


def test_gradients_are_read_and_a_checkpoint_takes_everything_back(tmp_path):
    """Norms are those without; what was begun is forgotten where another state comes."""
    found = []
    for offload in ({"optimizer": "cpu"}, EARLY):
        training = Training({**STRATEGIES["zero3"], "offload": offload}, model=Free, **MASTERS)
        training.steps(1)
        directory = str(tmp_path / f"{len(offload)}")
        training.accelerator.save_state(directory)
        training.accelerator.backward(loss_of(training.model, 7))
        norms = [float(p.grad.norm()) for p in training.model.parameters() if p.grad is not None]
        norms.append(
            float(training.accelerator.clip_grad_norm_(training.model.parameters(), math.inf))
        )
        training.accelerator.load_state(directory)
        training.optimizer.zero_grad()
        found.append((norms, training.steps(2, first=1).close()))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mixed_precision": "fp16"}, "expected no precision: fp16"),
        ({"config": {"on_nonfinite": "skip"}}, "expected no on_nonfinite: skip"),
    ],
)
@pytest.mark.ranks(1)
def test_steps_that_may_be_left_out_are_refused(options, text):
    training = Training({**STRATEGIES["zero2"], "offload": EARLY}, model=Free, **options)
    training.accelerator.backward(loss_of(training.model, 7))
    with pytest.raises(ConfigError, match=text):
        training.optimizer.step()


@pytest.mark.ranks(1)
def test_what_does_not_go_together():
    both = {**EARLY, "delayed": True}
    with pytest.raises(ConfigError, match="expected offload.delayed or offload.in_backward"):
        Training({**STRATEGIES["zero2"], "offload": both})
    with pytest.raises(ConfigError, match="expected a store in offload.optimizer"):
        Training({**STRATEGIES["zero2"], "offload": {"in_backward": True}})


def test_two_optimizers_step_what_is_theirs():
    """A unit of both waits for each; one that is not stepped is an error at the next backward."""
    found = []
    for offload in ({"optimizer": "cpu"}, EARLY):
        training = Training({**STRATEGIES["zero2"], "offload": offload}, model=Free, make=halves(0))
        other = training.accelerator.prepare(halves(1)(training.model))
        for seed in range(3):
            training.accelerator.backward(loss_of(training.model, seed))
            for optimizer in (training.optimizer, other):
                optimizer.step()
                optimizer.zero_grad()
        found.append(training.accelerator.get_state_dict(training.model))
        training.accelerator.backward(loss_of(training.model, 4))
        training.optimizer.step()
        training.optimizer.zero_grad()
        if offload is EARLY:
            with pytest.raises(UsageError, match="found another backward"):
                training.accelerator.backward(loss_of(training.model, 5))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def halves(number):
    def make(model):
        return SGD(list(model.parameters())[number::2], lr=0.1, momentum=0.9)

    return make


def test_optimizers_of_other_parameters_go_on():
    """Those whose parameters rest, with gradients of before, and those that come later."""
    found = []
    for offload in ({"optimizer": "cpu"}, EARLY):
        training = Training({**STRATEGIES["zero2"], "offload": offload}, model=Free, make=halves(0))
        accelerator, parameters = training.accelerator, list(training.model.parameters())
        optimizers = [training.optimizer]
        for seed in range(5):
            if seed == 1:
                optimizers.append(accelerator.prepare(halves(1)(training.model)))
            turn = seed % len(optimizers)
            for number, each in enumerate(parameters):
                each.requires_grad_(seed < 2 or number % 2 == turn)
            accelerator.backward(loss_of(training.model, seed))
            training.losses.append(float(accelerator.clip_grad_norm_(parameters, math.inf)))
            for number, optimizer in enumerate(optimizers):
                if seed < 2 or number == turn:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append((training.losses, accelerator.get_state_dict(training.model), {}))
    assert_same(*found)


class Pair:
    """Two models, the second of which judges the first."""

    def __init__(self, offload):
        strategy = {**STRATEGIES["zero2"], "offload": offload}
        self.accelerator = Accelerator(strategy=strategy, cpu=True)
        torch.manual_seed(5)
        models = [nn.Sequential(*(nn.Linear(12, 12) for _ in range(3))) for _ in range(2)]
        optimizers = [AdamW(model.parameters(), lr=1e-2) for model in models]
        self.maker, self.judge, *self.optimizers = self.accelerator.prepare(*models, *optimizers)
        self.parameters = [*self.maker.parameters(), *self.judge.parameters()]

    def backward(self, *, trains_judge, **options):
        self.judge.requires_grad_(trains_judge)
        rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
        made = self.maker(rows)
        loss = self.judge(made.detach() if trains_judge else made).square().mean()
        self.accelerator.backward(loss, **options)


def test_two_models_take_turns():
    """A backward through a model that does not train begins nothing of it."""
    found = []
    for offload in ({"optimizer": "cpu"}, EARLY):
        pair, norms = Pair(offload), []
        for _ in range(2):
            for trains_judge, optimizer in zip((False, True), pair.optimizers, strict=True):
                optimizer.zero_grad()
                pair.backward(trains_judge=trains_judge, weight=1.5)
                norms.append(float(pair.accelerator.clip_grad_norm_(pair.parameters, math.inf)))
                optimizer.step()
        weights = [pair.accelerator.get_state_dict(model) for model in (pair.maker, pair.judge)]
        found.append((norms, {**weights[0], **{f"judge.{k}": v for k, v in weights[1].items()}}))
    assert_same(*((norms, weights, {}) for norms, weights in found))


def test_gradients_of_two_models_stay_as_they_are():
    clips = "expected no clipping with offload.in_backward"
    for text, change in (
        (clips, lambda pair: pair.accelerator.clip_grad_norm_(pair.parameters, 1.0)),
        (clips, lambda pair: pair.accelerator.clip_grad_value_(pair.parameters, 1.0)),
        ("found another backward", lambda pair: pair.backward(trains_judge=True, weight=1.5)),
    ):
        pair = Pair(EARLY)
        pair.backward(trains_judge=False)
        with pytest.raises(UsageError, match=text):
            change(pair)


# --- updates go on in the background: forward waits for the units that it reaches, one by one ---


LAYERS, WIDTH = 4, 32


@pytest.mark.parametrize(
    ("strategy", "clip"),
    [
        ({"name": "zero1", "bucket_mib": 0.001}, True),
        ({"name": "zero3", "keep_below": 0, "own_unit_from": 1}, False),
        ({"name": "fsdp", "unit_from": 1}, True),
    ],
)
@pytest.mark.ranks(2)
def test_forward_begins_while_later_units_are_updated(strategy, clip, monkeypatch):
    """Only the first updates may pass until the first layer has computed."""
    accelerator = start({**strategy, "offload": {"optimizer": "cpu"}})
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    passed, reached = threading.Event(), threading.Event()
    updates = 0
    real = Tiler.update_all

    def update_all(tiler, pieces):
        nonlocal updates
        updates += 1
        if updates > 2 and not passed.wait(PATIENCE_S):
            raise AssertionError("forward waited for an update that it did not need yet")
        real(tiler, pieces)

    monkeypatch.setattr(Tiler, "update_all", update_all)
    accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
    if clip:
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()

    def computed(*_):
        assert updates <= 3  # the third one waits
        reached.set()
        passed.set()

    handle = model[0].register_forward_hook(computed)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    handle.remove()
    assert reached.is_set()
    assert updates == LAYERS
    accelerator.backward(loss)
    optimizer.step()
