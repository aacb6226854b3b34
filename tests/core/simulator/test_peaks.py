"""The predicted peak of memory, beside the most bytes that a rank has allocated in a step."""

import pytest
from plan import SUBJECTS, measured, plain_section, predicted

from drivetrain import Accelerator
from drivetrain.data.examples import Candidate
from drivetrain.hardware.description import load_hardware
from drivetrain.simulator.traced import traced_model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["wide", "pixels"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_step_allocates_the_predicted_bytes(name, strategy):
    subject = SUBJECTS[name]
    accelerator = Accelerator(cpu=True)
    candidate = Candidate("example", (subject.inputs(2),), {})
    paper = traced_model(subject.make(), [candidate])
    text = f"data_parallel={strategy}"
    plan = predicted(paper, subject, text, load_hardware("cpu"), accelerator)
    for _ in range(2):  # the second time what stays in the process is there
        _, peak = measured(accelerator, subject, plain_section(plan), steps=1)
    assert -0.03 < plan.peak_bytes / peak - 1 < 0.08
