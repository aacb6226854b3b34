"""The part of a strategy's contract for micro-batches that count nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.parts.naming import named_parameters


class Weighing:
    """Backwards whose gradients are zeros: by default autograd's, set to zero where they arrive."""

    @contextmanager
    def uncounted(self, module: nn.Module) -> Iterator[None]:
        """Context around the backward of a micro-batch that counts nothing: it adds zeros.

        Its loss, and whatever its graph computes, may be no numbers. All ranks take part in the
        backward as in any other.

        Args:
            module: as ``unwrap`` returns it; the graph may pass through it.
        """
        trained = [one for one in named_parameters(module).values() if one.requires_grad]
        hooks = [each.register_hook(torch.zeros_like) for each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
