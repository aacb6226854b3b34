"""What one Accelerator holds: its run, its prepared objects, its accumulation window."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.config import Resolved
from drivetrain.data import PreparedLoader
from drivetrain.errors import UsageError
from drivetrain.facade.forward import restore_forward
from drivetrain.facade.optimizer import PreparedOptimizer
from drivetrain.facade.options import Handlers, ProjectConfiguration
from drivetrain.facade.scheduler import PreparedScheduler
from drivetrain.facade.window import WindowMean
from drivetrain.processes import Processes
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.scaler import LossScaler
from drivetrain.runtime.world import World
from drivetrain.strategy import Run, Strategy, find_strategy
from drivetrain.traffic import Traffic


@dataclass(slots=True, eq=False)
class ModelEntry:
    """One prepared model and what belongs to it.

    Attributes:
        model: what the script holds.
        strategy: the strategy object made for this model.
        optimizers: what the strategy handed back, unwrapped, in the order given.
        names: parameter name by identity, as the user's model has it.
        scale: loss scale of the gradients at hand; None before the first backward.
        unscaled: whether the gradients at hand were divided by their scale, and carry 1.0.
        made_with: loss scale that they were divided by.
        overflow: whether the gradients at hand are infinite somewhere.
        note: the hook that notes which model runs.
        known: identities of the parameters that the strategy trains.
    """

    model: nn.Module
    strategy: Strategy[Any]
    optimizers: tuple[Optimizer, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    scale: float | None = None
    unscaled: bool = False
    made_with: float = 1.0
    overflow: bool = False
    note: RemovableHandle | None = None
    known: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Remember which parameters the model has now."""
        inner = self.strategy.unwrap(self.model)
        self.known = frozenset(map(id, inner.parameters()))

    def check_parameters(self) -> None:
        """Look for parameters that came after ``prepare``: nobody would average their gradients.

        Raises:
            UsageError: the model has another parameter that requires gradients.
        """
        # Every step comes here: by identity, since the known ones may be slow to ask anything.
        for prefix, module in self.strategy.unwrap(self.model).named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self.known or not parameter.requires_grad:
                    continue
                raise UsageError(
                    "expected the parameters that the model had in prepare(), found another one, "
                    f"{(f'{prefix}.{name}' if prefix else name)!r}; change the model before "
                    "prepare(), write new values into the old parameter inside 'with "
                    "accelerator.gathered(model):', or set requires_grad=False on what is not "
                    "trained"
                )

    def held_names(self) -> dict[int, str]:
        """Return parameter names by identity, also of what optimizers hold in place of them."""
        return {**self.names, **self.strategy.names()}

    def forget_gradients(self) -> None:
        """Drop the gradients at hand, and what is known of their scale."""
        self.strategy.unwrap(self.model).zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scale, self.unscaled, self.overflow = None, False, False

    def close(self) -> None:
        """Make the model an ordinary one again."""
        restore_forward(self.model)
        if self.note is not None:
            self.note.remove()
        self.strategy.close()


class Core(Processes):
    """The state that all facets of the Accelerator share.

    Args:
        resolved: the configuration of the run.
        world: this process among all processes.
        handlers: the option objects of the constructor.
        gradient_state: the accumulation window.
        project: where checkpoints and logs go.
        device_placement: move what is prepared to the rank's device.
    """

    def __init__(
        self,
        resolved: Resolved,
        world: World,
        handlers: Handlers,
        gradient_state: GradientState,
        project: ProjectConfiguration,
        *,
        device_placement: bool = True,
    ) -> None:
        super().__init__(world)
        self.config = resolved
        self.world = world
        self.handlers = handlers
        self.gradient_state = gradient_state
        self.project_configuration = project
        self.device_placement = device_placement
        self.traffic = Traffic()
        self.precision = Precision.configured(resolved.run)
        self.scaler = self._make_scaler()
        self.step = 0
        self._meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
        self.run = self._make_run(resolved)
        self._window = WindowMean(gradient_state, counted=False)
        self._entries: list[ModelEntry] = []
        self._last_run: ModelEntry | None = None
        self._bound: list[tuple[Optimizer, Optimizer]] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def mesh(self) -> Mesh:
        """The named axes of the run's strategy."""
        return self.run.mesh

    def strategy_of(self, model: nn.Module) -> Strategy[Any]:
        """Return the strategy object of a prepared model.

        Raises:
            UsageError: the model was not prepared here.
        """
        return self._entry_of(model).strategy

    def _entry_of(self, model: nn.Module) -> ModelEntry:
        for entry in self._entries:
            if entry.model is model or entry.strategy.unwrap(entry.model) is model:
                return entry
        raise UsageError(
            f"expected a model that this Accelerator prepared, found {type(model).__name__}; "
            "pass it to prepare() first and use what it returns"
        )

    def _entries_of(self, models: Sequence[nn.Module]) -> Iterable[ModelEntry]:
        return [self._entry_of(model) for model in models] if models else list(self._entries)

    def _entries_of_optimizer(self, optimizer: Optimizer) -> list[ModelEntry]:
        return [entry for entry in self._entries if any(o is optimizer for o in entry.optimizers)]

    def _make_run(self, resolved: Resolved) -> Run:
        """Lay the world out as the strategy asks; equal layouts share their process groups."""
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        sizes = kind.axes(options, self.world.size)
        key = tuple(sizes.items())
        if key not in self._meshes:
            self._meshes[key] = Mesh.build(sizes, self.world)
        return Run(
            world=self.world,
            mesh=self._meshes[key],
            precision=self.precision,
            accumulation=self.gradient_state.num_steps,
            traffic=self.traffic,
        )

    def _make_scaler(self) -> LossScaler:
        options = self.handlers.scaler
        return LossScaler(options, enabled=options.enabled and self.precision.needs_scaling)
