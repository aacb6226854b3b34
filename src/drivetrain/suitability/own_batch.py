"""Parameters that a forward writes by its own batch: ranks with other batches would go apart.

Torch has two layers of this kind. Writes of other forwards are met where the ranks' values are
compared, before the first gradients are averaged (``drivetrain.facade.weights``).
"""

from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.naming import clean_name


def check_forward_writes(model: nn.Module, ranks: int) -> None:
    """Refuse layers that shorten the rows of their own batch, where ranks have several batches.

    Args:
        model: as the user has it.
        ranks: those with batches of their own.

    Raises:
        UsageError: names the first such layer.
    """
    if ranks == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"expected layers that write no parameters in forward, found {clean_name(name)!r}, "
                f"{type(module).__name__} with max_norm={module.max_norm}, which shortens the rows "
                f"of its own batch, of which {ranks} ranks have other ones: their weights would "
                "differ. Leave max_norm out, and shorten all rows on every rank after each step: "
                "'with accelerator.gathered(model), torch.no_grad(): weight.copy_(torch.renorm("
                "weight, 2, 0, max_norm))'"
            )
