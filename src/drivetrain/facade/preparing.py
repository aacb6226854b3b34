"""prepare(): hands models to strategies, divides loaders, gates optimizers and schedulers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.cost import TensorSpec
from drivetrain.data import (
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)
from drivetrain.errors import UsageError
from drivetrain.facade.agreement import agree, model_facts
from drivetrain.facade.building import Building
from drivetrain.facade.core import ModelEntry
from drivetrain.facade.dtypes import check_dtypes, describe_dtypes, given_parameters
from drivetrain.facade.forward import ForwardNote, compute_in
from drivetrain.facade.joining import Joining
from drivetrain.facade.optimizer import PreparedOptimizer
from drivetrain.facade.scheduler import PreparedScheduler
from drivetrain.facade.settings import StrategyChoice, settle_strategy
from drivetrain.facade.training import Training
from drivetrain.log import get_logger
from drivetrain.strategy import find_strategy

logger = get_logger(__name__)


class Preparing(Training, Joining, Building):
    """The prepare family of the Accelerator."""

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool] | None = None,
        strategy: StrategyChoice | None = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Args:
            args: what to prepare; other objects, None and lists come back untouched, and so does
                what was prepared before.
            device_placement: for each argument whether it is moved to the rank's device; None means
                as the constructor says.
            strategy: another strategy for the models of this call.

        Returns:
            The prepared objects in the order given; one object alone is not put into a tuple.

        Raises:
            UsageError: an optimizer over foreign parameters, a model without parameters.
            RankMismatchError: the ranks hold different models.
        """
        placement = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placement) != len(args):
            raise UsageError(
                f"expected device_placement for each of the {len(args)} arguments, found "
                f"{len(placement)} values"
            )
        new = [o for o in args if isinstance(o, Optimizer) and not self._is_prepared(o)]
        results = list(args)
        for i, item in enumerate(args):
            if isinstance(item, nn.Module):
                results[i] = self._prepare_model(item, new, placement[i], strategy)
            elif isinstance(item, DataLoader):
                results[i] = self.prepare_data_loader(item, placement[i])
        self._refuse_foreign_parameters(new, models_given=len(self._entries) > 0)
        for i, item in enumerate(args):
            if isinstance(item, Optimizer):
                results[i] = self.prepare_optimizer(item)
        for i, item in enumerate(args):
            if _is_scheduler(item):
                results[i] = self.prepare_scheduler(item)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        strategy: StrategyChoice | None = None,
    ) -> nn.Module:
        """Prepare one model.

        Args:
            model: the user's module; the same object comes back unless the strategy must wrap it.
            device_placement: whether it is moved to the rank's device.
            evaluation_mode: place it and set its precision only; it is not trained.
            strategy: another strategy for this model.
        """
        if evaluation_mode:
            self._give_whole_values(model)
            self._place(model, device_placement)
            self._set_precision(model)
            self._announce_precision(model, given_parameters(model))
            return model
        return self._prepare_model(model, [], device_placement, strategy)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Wrap one optimizer so that it steps at the end of an accumulation window."""
        del device_placement  # state follows its parameters
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        for prepared in self._optimizers:
            if optimizer is prepared.given:
                return prepared
        bound = next((bound for given, bound in self._bound if given is optimizer), optimizer)
        for entry in self._entries:
            if _holds(bound, entry.names) and not any(o is bound for o in entry.optimizers):
                bound = entry.strategy.bind(bound)
                entry.optimizers = (*entry.optimizers, bound)
        prepared = PreparedOptimizer(optimizer, bound, self.gradient_state, self._before_step)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap one learning-rate scheduler so that it steps when its optimizer has stepped."""
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        inner = getattr(scheduler, "optimizer", None)
        mine = [
            o for o in self._optimizers if inner is o or inner is o.given or inner is o.optimizer
        ]
        by_samples = self.config.run.step_scheduler_with == "samples"
        split = self.config.run.data.split_batches
        prepared = PreparedScheduler(
            scheduler,
            mine or self._optimizers,
            self.gradient_state,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            steps_per_call=self.mesh["dp"].size if by_samples and not split else 1,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """Divide one loader over the data-parallel axis.

        Args:
            data_loader: the user's loader.
            device_placement: whether its batches are moved to the rank's device.
            slice_fn_for_dispatch: not supported; batches are cut along dim 0.
        """
        if slice_fn_for_dispatch is not None:
            raise UsageError("expected no slice_fn_for_dispatch; batches are cut along dim 0")
        if isinstance(data_loader, PreparedLoader):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        data = dataclasses.replace(self.config.run.data, even_batches=self.even_batches)
        prepared = prepare_data_loader(
            data_loader,
            axis=self.mesh["dp"],
            world=self.world,
            config=data,
            seed=self.config.run.seed if data.data_seed is None else data.data_seed,
            device=self.device if place else None,
            observer=self.gradient_state,
            rng_types=self.rng_types,
        )
        self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader positioned ``num_batches`` from the start of its epoch.

        The position is absolute, so a script that calls this after ``load_state`` does not skip
        twice; ``load_state`` alone is enough.

        Args:
            dataloader: a prepared loader, or any other one.
            num_batches: batches of this rank to pass over, without reading them.
        """
        return skip_first_batches(dataloader, num_batches)

    step_scheduler_with_optimizer: bool
    rng_types: Sequence[str]
    even_batches: bool

    def _is_prepared(self, item: Any) -> bool:
        return isinstance(item, PreparedOptimizer)

    def _prepare_model(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device_placement: bool | None,
        choice: StrategyChoice | None,
    ) -> nn.Module:
        for entry in self._entries:
            if entry.model is model:
                return model
        _refuse_empty(model)
        values = self._values_of(model)
        facts = [*model_facts(model), *values.facts]
        agree(self.world, f"the model {type(model).__name__}", facts)
        values.check()
        resolved = self.config if choice is None else settle_strategy(choice, self.config)
        run = self.run if choice is None else self._make_run(resolved)
        names = _names_of(model)
        earlier = [prepared.optimizer for prepared in self._optimizers]
        mine = [o for o in [*optimizers, *earlier] if _holds(o, names)]
        given = given_parameters(model)
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        strategy = kind(options, run)
        self._give_values(model, mine, strategy, values)
        self._place(model, device_placement)
        try:
            prepared, bound = strategy.prepare(model, mine)
            entry = ModelEntry(prepared, strategy, tuple(bound), names)
            check_dtypes(entry, given, self.precision)
        except BaseException:
            strategy.close()
            raise
        self._announce_precision(model, given)
        self._bind(mine, bound)
        self._entries.append(entry)
        self._models.append(prepared)
        self._set_precision(prepared)
        # Before the strategy's own hook, which may communicate.
        note = ForwardNote(functools.partial(self._note_forward, entry))
        entry.note = prepared.register_forward_pre_hook(note, prepend=True)
        return prepared

    def _bind(self, given: Sequence[Optimizer], bound: Sequence[Optimizer]) -> None:
        """Remember what the strategy made of the optimizers, also for those wrapped already."""
        pairs = list(zip(given, bound, strict=True))
        self._bound = [pair for pair in self._bound if pair[0] not in given] + pairs
        for prepared in self._optimizers:
            for before, after in pairs:
                if prepared.optimizer is before:
                    prepared.optimizer = after

    def _note_forward(self, entry: ModelEntry, module: nn.Module) -> None:
        if torch.is_grad_enabled():
            self._last_run = entry
            self._announce(entry, module.training)

    def _set_precision(self, model: nn.Module) -> None:
        if self.precision.compute is not None and self.handlers.autocast.enabled:
            handler = self.handlers.autocast
            # Nothing of this Accelerator inside: copies and pickles of the model hold it too.
            compute_in(
                model,
                functools.partial(
                    self.precision.autocast, self.device, cache_enabled=handler.cache_enabled
                ),
            )

    def _announce_precision(self, model: nn.Module, given: Sequence[TensorSpec]) -> None:
        autocast = self.handlers.autocast.enabled
        line = describe_dtypes(model, given, self.precision, autocast=autocast)
        scale = self.scaler.get_scale()
        logger.announce(f"{line}, loss scale {scale:g}" if self.scaler.is_enabled() else line)

    def _refuse_foreign_parameters(
        self, optimizers: Sequence[Optimizer], *, models_given: bool
    ) -> None:
        """Raise when an optimizer holds a parameter of no prepared model."""
        known = {key for entry in self._entries for key in entry.held_names()}
        for optimizer in optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if models_given and id(parameter) not in known:
                        raise UsageError(
                            f"expected {type(optimizer).__name__} to hold parameters of prepared "
                            f"models, found a foreign one of shape {tuple(parameter.shape)} in "
                            f"group {i}; create the optimizer from the parameters of the model "
                            "passed to prepare(), and pass every model it trains"
                        )


def _is_scheduler(item: Any) -> bool:
    if isinstance(item, PreparedScheduler | torch.optim.lr_scheduler.LRScheduler):
        return True
    return (
        not isinstance(item, nn.Module | Optimizer | DataLoader)
        and hasattr(item, "optimizer")
        and hasattr(item, "step")
        and hasattr(item, "state_dict")
    )


def _refuse_empty(model: nn.Module) -> None:
    if next(model.parameters(), None) is None:
        raise UsageError(
            f"expected a model with parameters, found {type(model).__name__} without any; "
            "a loss or other function needs no prepare()"
        )


def _names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by identity, as the user's uncompiled model has it."""
    return {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}


def _holds(optimizer: Optimizer, names: dict[int, str]) -> bool:
    return any(id(p) in names for group in optimizer.param_groups for p in group["params"])
