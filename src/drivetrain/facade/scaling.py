"""The loss scale in the training step: which scale gradients carry, and which steps are skipped."""

from collections.abc import Iterable

from torch.optim import Optimizer

from drivetrain.facade.core import Core, ModelEntry


class Scaling(Core):
    """The loss scale of the Accelerator."""

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because of an infinite gradient."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def unscale_gradients(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale; happens by itself before clipping and stepping.

        Args:
            optimizer: prepared optimizers whose models' gradients are unscaled; None means all.
        """
        if optimizer is None:
            chosen: list[Optimizer] = list(self._optimizers)
        else:
            chosen = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in chosen:
            for entry in self._entries_of_optimizer(getattr(each, "optimizer", each)):
                self._unscale(entry)

    def _note_scale(self) -> None:
        """Make gradients at hand, and those that backward is about to add, carry one scale.

        What is at hand carries another one when it was unscaled already, or when the scale has
        changed since with the step of another model.
        """
        if not self.scaler.is_enabled():
            return
        scale = self.scaler.get_scale()
        for entry in self._entries:
            if entry.scale not in (None, scale):
                entry.strategy.scale_gradients(scale / entry.scale)
            entry.scale, entry.unscaled = scale, False

    def _unscale(self, entry: ModelEntry) -> None:
        if entry.scale is None or entry.unscaled or not self.scaler.is_enabled():
            return
        entry.overflow = self.scaler.unscale(
            list(entry.strategy.gradients()),
            entry.scale,
            ranks=self.world.size,
            device=self.device,
        )
        entry.made_with, entry.scale, entry.unscaled = entry.scale, 1.0, True

    def _before_step(self, optimizer: Optimizer) -> bool:
        """Unscale what is still scaled; return whether the step may be taken.

        Raises:
            UsageError: the model has parameters that it did not have in ``prepare``.
        """
        entries = self._entries_of_optimizer(optimizer)
        for entry in entries:
            entry.check_parameters()
        if not self.scaler.is_enabled():
            return True
        for entry in entries:
            self._unscale(entry)
        bad = [entry.made_with for entry in entries if entry.overflow]
        number = next(i for i, each in enumerate(self._optimizers) if each.optimizer is optimizer)
        self.scaler.record(number, overflow=bool(bad), made_with=min(bad, default=1.0))
        if self.gradient_state.micro_batch == 0:
            self.scaler.update()
        return not bad
