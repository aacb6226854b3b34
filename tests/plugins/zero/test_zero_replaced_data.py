"""``parameter.data = ...`` under ZeRO: surgery after a step, averages swapped in, wrong shapes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.testing.conformance.suite import Twins, adamw, weights
from drivetrain.testing.models import CASES
from stacks import Parts
from zero_stages import FSDP, MASTERS, STAGES, each, start

pytestmark = pytest.mark.ranks(2)

EACH = pytest.mark.parametrize(
    "strategy",
    [
        STAGES["zero1"],
        {"name": "zero2", "offload": {"optimizer": "cpu"}},
        {"name": "zero2", "partition": "parameter"},
    ],
    ids=["zero1", "offload", "zero2 whole"],
)


def both(twins):
    for model in (twins.model, twins.twin):
        yield [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(twins, step):
    twins.backward(step)
    twins.step()


@EACH
def test_data_that_a_script_sets_is_trained(strategy):
    """Clipping of weights by assignment, after steps, with tied, odd, empty and 0-d parameters."""
    for case in ("tied", "odd_shapes"):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES[case], adamw)
        for step in range(3):
            train(twins, step)
            for parameters in both(twins):
                for parameter in parameters:
                    parameter.data = parameter.data.clamp(-0.05, 0.05)
            twins.check()  # a state dict reads what was set


@EACH
def test_averages_swapped_in_and_out(strategy, tmp_path):
    """Neither an evaluation nor a save writes into the memory that the script holds meanwhile."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    averages = [[p.data.clone() for p in parameters] for parameters in both(twins)]
    for step in range(2):
        train(twins, step)
        olds = []
        for parameters, average in zip(both(twins), averages, strict=True):
            olds.append([parameter.data for parameter in parameters])
            for parameter, mean in zip(parameters, average, strict=True):
                mean.lerp_(parameter.data, 0.3)
                parameter.data = mean
        with torch.no_grad():
            mine = twins.case.loss(twins.model, twins.case.batch(step, 0))
            theirs = twins.case.loss(twins.twin, twins.case.batch(step, 0))
        torch.testing.assert_close(mine, theirs)
        twins.check()
        accelerator.save_state(tmp_path / f"swapped-{step}")
        for parameters, old in zip(both(twins), olds, strict=True):
            for parameter, data in zip(parameters, old, strict=True):
                parameter.data = data
        twins.check()
    accelerator.load_state(tmp_path / "swapped-1")
    loaded = weights(accelerator, twins.model)
    _, theirs = averages
    trained = [name for name, p in twins.twin.named_parameters() if p.requires_grad]
    for name, mean in zip(trained, theirs, strict=True):
        torch.testing.assert_close(loaded[name], mean)


@EACH
def test_data_set_in_gathered_and_before_a_load(strategy, tmp_path):
    """Rank 0's tensors become everybody's; what a checkpoint brings comes after what was set."""
    accelerator = start(strategy)
    twins = Twins(accelerator, CASES["tied"], adamw)
    train(twins, 0)
    kept = {name: value.clone() for name, value in weights(accelerator, twins.model).items()}
    folder = tmp_path / "state"
    accelerator.save_state(folder)
    mine, theirs = both(twins)
    with accelerator.gathered(twins.model):
        for parameter in mine:
            changed = 1.5 if accelerator.is_main_process else 7.0
            parameter.data = parameter.data * changed
    for parameter in theirs:
        parameter.data = parameter.data * 1.5
    twins.check()
    train(twins, 1)
    twins.check()
    for parameter in mine:
        parameter.data = parameter.data + 3.0
    accelerator.load_state(folder)
    torch.testing.assert_close(weights(accelerator, twins.model), kept)


def test_wrong_data_are_refused():
    """Another shape or dtype is refused in the step, on every rank; the right one makes it go on.

    Other memory inside of a forward is refused when a divided unit is about to be freed.
    """
    for strategy in (STAGES["zero1"], {"name": "zero3"}):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES["tied"], adamw)
        train(twins, 0)
        (parameter, *_), _ = both(twins)
        for wrong in (parameter.data[:1].clone(), parameter.data.float()):
            right = parameter.data
            parameter.data = wrong
            with pytest.raises(UsageError, match=r"expected data of shape .* found"):
                twins.optimizer.step()
            parameter.data = right
        train(twins, 1)
        twins.check()

    class Replacing(torch.nn.Linear):
        def forward(self, inputs):
            self.weight.data = self.weight.data.clone()
            return super().forward(inputs)

    accelerator = start(FSDP)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), Replacing(4, 4)))
    with pytest.raises(UsageError, match=r"'1\.weight'"):
        model(torch.ones(2, 4)).sum()


# --- writes into parameters: masters follow, and ranks that write differently hear of it ---


def shortening(m, rows):
    """Shorten the rows of a batch, from the third call on, more each time."""
    m.calls += 1
    return F.embedding(rows, m.table.weight, max_norm=1.0 / m.calls if m.calls > 2 else None)


@pytest.mark.parametrize(("name", "alike"), [("zero2", 0), ("zero3", 1), ("fsdp", 0)])
def test_rows_that_each_rank_writes_by_itself_are_refused(name, alike):
    """The first time, or after a time at which ranks wrote alike."""
    accelerator = Accelerator(strategy=name, cpu=True)
    model = Parts(shortening, table=nn.Embedding(8, 4), calls=0)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
    rows = torch.arange(8).chunk(2)[accelerator.process_index]
    for step in range(3 + alike):
        last = step == 2 + alike
        accelerator.backward(model(rows if last else torch.arange(8)).square().mean())
        if not last:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RankMismatchError, match="written different values"):
        optimizer.step()


@each("zero1", "zero2")
def test_masters_follow_what_a_script_writes_before_a_step(strategy):
    """A step of rate 0 leaves weights in bf16 as they were written; masters would undo it."""

    def set_data(parameter):
        parameter.data = torch.full_like(parameter, 0.25)

    for write in (lambda parameter: parameter.fill_(0.25), set_data):
        accelerator = start(strategy, **MASTERS)
        linear = nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(linear, SGD(linear.parameters(), lr=0.0))
        accelerator.backward(model(torch.ones(2, 4)).float().sum())
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)
        optimizer.step()
        assert all(each.eq(0.25).all() for each in accelerator.get_state_dict(model).values())
