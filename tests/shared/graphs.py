"""Graphs of ``torch.compile`` in tests: made anew by a backend, and counted."""

import os
from contextlib import contextmanager

import pytest
import torch

from drivetrain.model import modules


@contextmanager
def backend(name):
    """Context in which graphs are counted anew, and made by a backend."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one_thread = torch._inductor.config.patch(compile_threads=1)  # nobody would join others
    with pytest.MonkeyPatch.context() as patch, one_thread:
        patch.setattr(modules, "BACKEND", name)
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # inductor's, for its libraries


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
