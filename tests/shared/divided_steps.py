"""Two steps of a model that ranks share, compared with those of one process."""

import copy

import torch

from drivetrain import Accelerator


def check_two_steps(model, batch, cell, tolerance=1e-7):
    """Train a model and its twin for two steps, compare, and return the share that a rank has.

    The routers of Hugging Face compute in fp32.
    """
    twin = copy.deepcopy(model)
    whole = sum(parameter.untyped_storage().nbytes() for parameter in twin.parameters())
    lone = torch.optim.SGD(twin.parameters(), lr=0.1)
    accelerator = Accelerator(strategy={"name": "megatron", **cell}, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        expected, loss = twin(**batch)["loss"], model(**batch)["loss"]
        expected.backward()
        accelerator.backward(loss)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=tolerance, atol=0)
        for each in (lone, optimizer):
            each.step()
            each.zero_grad()
    state = accelerator.get_state_dict(model)
    torch.testing.assert_close(state, twin.state_dict(), rtol=tolerance, atol=tolerance)
    held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    accelerator.free_memory()
    return held / whole
