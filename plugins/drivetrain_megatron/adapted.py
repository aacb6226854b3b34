"""Calls of the model inside of a model of ``peft`` go through the pipeline of the whole.

``PeftModel.generate`` calls the model inside by itself. The stages are those of the whole model,
whose forward hands its arguments on to the one inside, unless it puts learned prompts before them.
"""

from typing import Any

from torch import nn

from drivetrain.errors import UsageError
from drivetrain.parts.guard import Arguments, Function, Keywords
from drivetrain.parts.wrapping import unwrap_forward, wrap_forward

_WHOLE, _INSIDE = "_forward_before_passes", "_forward_before_calls_inside"


class AdaptedModel:
    """A model of ``peft`` before it is cut into stages; other models stay as they are.

    Args:
        model: whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside = _inside(model)
        self._passes = 0
        if self._inside is not None:
            wrap_forward(model, _WHOLE, self._pass)

    def redirect(self) -> None:
        """Let calls of the model inside be calls of the whole, from now on."""
        if self._inside is not None:
            wrap_forward(self._inside, _INSIDE, self._call)

    def close(self) -> None:
        """Give both their own forward back."""
        if self._inside is not None:
            unwrap_forward(self._inside, _INSIDE)
            unwrap_forward(self._model, _WHOLE)

    def _pass(self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Run the whole forward, in which the model inside computes by itself."""
        self._passes += 1
        try:
            return compute(*args, **kwargs)
        finally:
            self._passes -= 1

    def _call(self, module: nn.Module, compute: Function, args: Arguments, kwargs: Keywords) -> Any:
        """Compute the model inside, as a part of the whole or for a caller of its own."""
        if self._passes:
            return compute(*args, **kwargs)
        if getattr(getattr(self._model, "active_peft_config", None), "is_prompt_learning", False):
            raise UsageError(
                "expected a call of the prepared model, found one of the model inside of it, as "
                "generate() of peft makes them: with learned prompts the two differ, and the "
                "pipeline's stages are those of the whole. Generate after training in one process, "
                "or use no pipeline (pp: 1)"
            )
        return self._model(*args, **kwargs)


def _inside(model: nn.Module) -> nn.Module | None:
    """Return the model inside of a model of peft, and None for others."""
    answer = getattr(model, "get_base_model", None)
    inside = answer() if callable(answer) else None
    return inside if isinstance(inside, nn.Module) and inside is not model else None
