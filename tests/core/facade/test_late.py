"""Numbers of a device are copied in the order of its work, and waited for by nobody."""

import pytest
import torch

from drivetrain.facade.exchange import LateNumbers


def test_numbers_of_the_host_are_there_at_once():
    weight = torch.ones(1, requires_grad=True)
    late = LateNumbers({"loss": (weight * 2).sum(), "lr": 0.5, "own": torch.tensor([3])})
    assert late.ready()
    assert late.read() == {"loss": 2.0, "lr": 0.5, "own": 3.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_numbers_of_a_device_come_later_and_are_those_of_their_step():
    device = torch.accelerator.current_accelerator()
    large = torch.randn(4096, 4096, device=device)
    total = torch.zeros((), device=device)
    for _ in range(50):
        large = large @ large / 64
    late = LateNumbers({"loss": total + 2, "lr": 0.5})
    was_ready = late.ready()
    total += 7  # as a script that goes on
    assert not was_ready  # nobody has waited for the products
    assert late.read() == {"loss": 2.0, "lr": 0.5}
    assert late.ready()
