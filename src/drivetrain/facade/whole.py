"""Whole parameters, whatever a strategy does with them: for surgery and for generation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.facade.core import Core


class Whole(Core):
    """The contexts of the Accelerator in which parameters are whole on every rank."""

    @contextmanager
    def gathered(
        self,
        what: nn.Module | Tensor | Iterable[Tensor],
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> Iterator[None]:
        """Context for reading, initialising and changing whole parameters. Collective.

        What is changed inside is kept, under every strategy. Make the same change on every rank, or
        on rank 0 alone: its values become those of all ranks.

        Args:
            what: a prepared model, or parameters of prepared models.
            parameters: which parameters of the model; None means all.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        if isinstance(what, nn.Module):
            entry = self._entry_of(what)
            chosen = list(what.parameters()) if parameters is None else list(parameters)
            with entry.strategy.gathered(chosen):
                yield
            return
        given = [what] if isinstance(what, Tensor) else list(what)
        known = {key for entry in self._entries for key in entry.names}
        if any(id(parameter) not in known for parameter in given):
            raise UsageError(
                "expected parameters of prepared models, found another tensor; take them from "
                "the model that prepare() returned"
            )
        with ExitStack() as stack:
            for entry in self._entries:
                own = [p for p in given if id(p) in entry.names and isinstance(p, nn.Parameter)]
                if own:
                    stack.enter_context(entry.strategy.gathered(own))
            yield

    @contextmanager
    def inference(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context for generation and long evaluation. Collective.

        Inside, the model is in evaluation mode and no gradients are computed. Where ranks divide
        parameters, these are gathered once, and forward needs no communication: ranks may run it
        as often as they like, each on its own. Where ranks divide the computation itself (tensor
        and pipeline parallelism), the ranks of a cell still run every forward together.

        Args:
            model: a prepared model.

        Yields:
            The user's own module.
        """
        entry = self._entry_of(model)
        inner = entry.strategy.unwrap(entry.model)
        training = [module for module in inner.modules() if module.training]
        with entry.strategy.inference(inner), torch.no_grad():
            inner.eval()
            try:
                yield inner
            finally:
                for module in training:
                    module.training = True
