"""The bytes that a simulated step promises, beside those that the ranks count."""

import pytest
import torch
from plan import SUBJECTS, plain_section, predicted

from drivetrain import Accelerator
from drivetrain.data.examples import Candidate
from drivetrain.hardware.description import load_hardware
from drivetrain.simulator.traced import traced_model

STEPS = 3

LIMIT, OF_A_SEQUENCE = 0.02, 0.14
"""Allowed errors; under ``fsdp`` each child of a ``Sequential`` is a unit, and the paper takes the
last one for a head, which no unit stays whole for: a gather too few in five or four."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, text) for name, subject in SUBJECTS.items() for text in subject.layouts],
)
def test_a_step_sends_the_promised_bytes(name, layout):
    """All axes and operations together."""
    subject = SUBJECTS[name]
    accelerator = Accelerator(cpu=True)
    paper = traced_model(subject.make(), [Candidate("example", (subject.inputs(2),), {})])
    plan = predicted(paper, subject, layout, load_hardware("cpu"), accelerator)
    model = subject.make()
    model.example_inputs = (subject.inputs(2),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer, strategy=plain_section(plan))

    def step() -> None:
        target = torch.randint(subject.classes, (subject.targets,))
        logits = model(subject.inputs(subject.rows))
        accelerator.backward(torch.nn.functional.cross_entropy(logits.flatten(0, -2), target))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = accelerator.traffic.sent()
    for _ in range(STEPS):
        step()
    after = accelerator.traffic.sent()
    counted = {
        key: (after[key] - before.get(key, 0)) / STEPS
        for key in after
        if after[key] > before.get(key, 0)
    }
    limit = OF_A_SEQUENCE if layout == "data_parallel=fsdp" and name != "words" else LIMIT
    assert sum(plan.sent.values()) == pytest.approx(sum(counted.values()), rel=limit)
