"""The contract between the facade and a strategy: everything the facade calls is declared here.

A strategy spreads one model's training step over the ranks of a mesh. The facade makes one strategy
object per prepared model, so nothing about a run is global, and it never asks which strategy it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.compression.compressor import Compressor
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.outline import ConfigT, Outline, working
from drivetrain.cost import Cost, ModelSpec, Traffic
from drivetrain.data.examples import ExampleBatches
from drivetrain.errors import ConfigError, UsageError
from drivetrain.model.deferred import fill, meta_tensors
from drivetrain.registry import strategies
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.saved_state import TrainingState
from drivetrain.shards import WeightSource

if TYPE_CHECKING:
    from drivetrain.simulator.contract import Sharing, StepBound, UnitCosts
    from drivetrain.simulator.step import SimulatedRun, SimulatedStep, SimulatedUnit

Only: TypeAlias = Collection[nn.Parameter] | None
"""The parameters that are meant; None: all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything a strategy may know about the run it is part of.

    Attributes:
        world: this process among all processes.
        mesh: the axes that ``Outline.axes`` asked for, by name.
        precision: the dtypes of parameters, compute, reduction and master copies.
        accumulation: micro-batches per optimizer step.
        traffic: the ledger that every collective adds to.
        examples: small batches of the prepared loaders, for strategies that look at the model.
        links: the methods for what crosses a slow link.
    """

    world: World
    mesh: Mesh
    precision: Precision
    accumulation: int
    traffic: Traffic
    examples: ExampleBatches = field(default_factory=ExampleBatches)
    links: LinkMethods = field(default_factory=LinkMethods)

    def bytes_between_hosts(self, sent: Mapping[tuple[str, str], int]) -> int:
        """Return the bytes that leave rank 0's host: messages go around in rings of neighbors.

        Of the ranks that a host has on a ring, one sends to another host; a host has several rings
        where each takes a part of its ranks. The stages of a pipeline are a chain: a rank that
        sends to a stage on its own host stands for the rank of this host that sends to the next
        host, as many bytes, or half as many where these are rounded.

        Args:
            sent: bytes that one rank sends by (axis, operation), from a ledger or a ``Cost``.
        """
        total = 0
        for (name, operation), nbytes in sent.items():
            axis = name.partition(".")[0]
            try:
                line = self.mesh[axis] if operation == "send" else self.mesh.line(name)
            except KeyError:
                continue  # of another strategy's mesh
            if line.spans_hosts:
                total += nbytes * self.world.island_size // line.hosts.count(line.hosts[line.rank])
        return total


class Prepared(NamedTuple):
    """The result of ``Strategy.prepare``: use these objects instead of the arguments.

    Attributes:
        model: the module that was given, or another with the same names of parameters and buffers.
        optimizers: those that step in place of the given ones, in their order.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]


class Form(NamedTuple):
    """A strategy with some options set: one row where promises are compared.

    Attributes:
        options: by name; those at their default are left out.
        exact: whether every rank gets the mean of the gradients; False where it is approximated.
    """

    options: Mapping[str, Any] = {}
    exact: bool = True


def find_strategy(name: str, options: Any = None) -> tuple[type["Strategy[Any]"], Any]:
    """Return the class that does the work of an installed strategy, and its options.

    Args:
        name: of the strategy; "" for the default one.
        options: its Config object; None for its defaults.

    Raises:
        ConfigError: it is not installed, or its options do not fit together.
    """
    name, options = working(name, options)
    return strategies().load(name), options


# --- what is asked of a strategy before a run ---


class StrategyPick(NamedTuple):
    """A strategy that was chosen at ``prepare``.

    Attributes:
        section: its name and options, as the configuration has them.
        settings: further keys of the configuration that belong to the choice.
        reason: a line for the log.
        seconds: of a step, as predicted.
        hint: words after the prediction, once it is compared with the run: what would mend it.
    """

    section: Mapping[str, Any]
    settings: Mapping[str, Any]
    reason: str
    seconds: float
    hint: str = ""


_GONE: Mapping[str, str] = {
    **dict.fromkeys(("publish", "share_outputs", "uncounted", "units"), "pipeline"),
    **dict.fromkeys(("divides_states", "load_states", "held_parts", "held_tensors"), "state"),
    **dict.fromkeys(("shards", "load", "check_load", "progress", "resume"), "state"),
    **dict.fromkeys(("gathered", "state_facts", "whole_state", "dtensors", "whereabouts"), "state"),
    **dict.fromkeys(("gradients", "scale_gradients", "clip_grad_norm"), "gradients"),
    **dict.fromkeys(("will_scale", "step_decided"), "gradients"),
    **dict.fromkeys(("states_among", "forward_is_collective"), "pace"),
    "draws_masks": "planning()",
    "unwrap": "prepare",
}
"""Methods of earlier versions that nobody calls any more, by what says the same now."""

_GONE_FROM_PLANNING: Mapping[str, str] = {
    "step": "simulate",
    "bound": "lower_bound",
    "part": "local_model",
    "forms": "candidates",
    "draws_steps": "simulates",
}
"""The same of what ``planning()`` returns."""


def _refuse(cls: type, gone: Mapping[str, str]) -> None:
    """Refuse a class of a plugin that was written for an earlier version."""
    for name in cls.__dict__.keys() & gone.keys():
        raise UsageError(
            f"expected a strategy for this version of drivetrain, found {cls.__name__}.{name}, "
            f"which nobody calls: see {gone[name]} in docs/writing-a-plugin.md"
        )


class Planning:
    """What a strategy says before a run: its forms, its simulated steps, its use of slow links.

    By default there is one form, and no plan.

    Attributes:
        layout_keys: keys of ``--layout`` that are about this strategy, with the option that each
            one sets. Data-parallel strategies that need none have none.
        inner_option: the option that holds a data-parallel strategy inside of this one, or "".

    Args:
        kind: the strategy's class.
    """

    layout_keys: ClassVar[Mapping[str, str]] = {}
    inner_option: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse(cls, _GONE_FROM_PLANNING)

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    # --- its forms ---

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return the options of each form in which ``verify --strategy all`` tries it."""
        return ({},)

    def candidates(self, world: World) -> Sequence[Form]:
        """Return the forms whose costs ``estimate`` and the wizard compare: those of ``verify``."""
        return [Form(options) for options in self.variants(world.size)]

    def stages(self, config: Any) -> Sequence[str]:
        """Return the axes whose ranks compute other parts of the model: by default none."""
        return ()

    def draws_masks(self, config: Any) -> bool:
        """Return whether dropout has masks of the strategy's own, not those of one process."""
        return False

    # --- the choice of methods for slow links ---

    def crosses_links(self, config: Any, world: World) -> bool:
        """Return whether ranks of a world send anything by the methods for slow links.

        By default they do where the world has several hosts.
        """
        return world.spans_hosts

    def changes_links(self, config: Any) -> bool:
        """Return whether methods may be chosen after the first steps, by ``take_links``.

        Then a backward is the compute beside the sums of gradients, and its half the compute beside
        gathers of values. By default methods are chosen at ``prepare()`` alone.
        """
        return False

    def advises_against(self, config: Any, method: Compressor[Any]) -> bool:
        """Return whether training by a method for gradients is known to go wrong.

        A run may name such a method; ``auto`` leaves the method out. By default none is known.
        """
        return False

    # --- its simulated steps ---

    def simulate(
        self, config: Any, units: Sequence["SimulatedUnit"], run: "SimulatedRun"
    ) -> "SimulatedStep":
        """Draw the step of the ranks of one replica.

        Args:
            config: the strategy's options.
            units: of the whole model, for one micro-batch, in the order of forward.
            run: sizes of axes, micro-batches, bytes per element.

        Raises:
            ConfigError: the strategy draws no step, or the model cannot be divided so.
        """
        raise ConfigError(
            f"{self.kind.__name__} simulates no step, so it cannot be planned; choose another "
            "strategy, or write a simulate() for its planning()"
        )

    def lower_bound(
        self, config: Any, units: Sequence["SimulatedUnit"], run: "SimulatedRun", costs: "UnitCosts"
    ) -> "StepBound":
        """Return a lower bound of a step, quickly: a search asks thousands of times.

        By default the sums over the units, each of whose steps is drawn once.

        Args:
            config: the strategy's options.
            units: as for ``simulate``.
            run: as for ``simulate``.
            costs: what single units cost.

        Raises:
            ConfigError: as ``simulate`` does.
        """

        def draw(some: Sequence["SimulatedUnit"], run: "SimulatedRun") -> "SimulatedStep":
            return self.simulate(config, some, run)

        from drivetrain.simulator.contract import stage_bound  # loaded by who plans

        found = costs.of(units, (self.kind, repr(config)), draw, run)
        return stage_bound(found, run.micro_batches, 1)

    def choose(
        self, config: Any, model: nn.Module, run: Any, recompute: Sequence[str]
    ) -> StrategyPick | None:
        """Return another strategy to prepare a model in place of this strategy; by default none.

        Collective: all ranks return the same, over the same axes.

        Args:
            config: the strategy's options.
            model: as the script passes it to ``prepare``.
            run: the ``Run``, with the loaders that the script prepares.
            recompute: the modes of activation recompute that may be chosen.

        Raises:
            ConfigError: nothing can be chosen.
        """
        return None

    def local_model(self, config: Any, model: ModelSpec, run: Any) -> ModelSpec:
        """Return the tensors of a model as a rank's modules have them: by default all of it.

        Another shape than in the model is that of a part which this rank trains by itself.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.
        """
        return model

    def stepped(self, config: Any, model: ModelSpec, run: Any) -> Mapping[str, tuple[int, int]]:
        """Return the elements that a rank's optimizers step: by default all of ``local_model``.

        Args:
            config: the strategy's options.
            model: the whole one.
            run: the ``Run``.

        Returns:
            By name of a trainable parameter: first element and one past the last, in the order of
            memory of the part.
        """
        here = self.local_model(config, model, run)
        return {spec.name: (0, spec.numel) for spec in here.parameters if spec.trainable}

    @property
    def simulates(self) -> bool:
        """Whether the strategy has a ``simulate`` of its own."""
        return type(self).simulate is not Planning.simulate

    def options_of_layout(self, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options that some of ``layout_keys`` stand for."""
        return {self.layout_keys[key]: value for key, value in keys.items()}

    def layouts(
        self, blocks: int, heads: int, ranks: int, per_host: int
    ) -> Iterable[Mapping[str, Any]]:
        """Return the values of ``layout_keys`` that a search tries; the empty ones by default.

        Args:
            blocks: repeated blocks of the model.
            heads: heads of attention.
            ranks: of all hosts.
            per_host: ranks of a host.
        """
        return ({},)


class DataParallelPlanning(Planning):
    """Plans of a strategy whose step follows from what its ranks divide.

    Args:
        kind: the strategy's class.
        sharing: says how its options divide the state, or raises ConfigError.
    """

    def __init__(self, kind: Any, sharing: Callable[[Any, "SimulatedRun"], "Sharing"]) -> None:
        super().__init__(kind)
        self._sharing = sharing

    def simulate(
        self, config: Any, units: Sequence["SimulatedUnit"], run: "SimulatedRun"
    ) -> "SimulatedStep":
        """Draw the step of data parallelism over what is divided."""
        from drivetrain.simulator.contract import data_parallel_step  # loaded by who plans

        return data_parallel_step(units, run, self._sharing(config, run))


# --- the contract ---


class Pipeline(Protocol):
    """A model whose stages lie on several ranks: some of them see a loss, and an output, later.

    Attributes:
        shares_outputs: whether training calls return outputs with values on every rank, for loops
            that read outputs before backward.
        counts: whether the backward of a micro-batch counts; one that does not adds zeros, and
            its loss may be no number. All ranks take part in it as in any other.
        units: the modules of this rank's computation in their order, by name.
    """

    shares_outputs: bool
    counts: bool
    units: Mapping[str, nn.Module]

    def loss(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor],
    ) -> Tensor:
        """Return the mean loss of a batch, which ``backward`` is given next.

        Args:
            args: the model's positional inputs.
            kwargs: its inputs by name.
            targets: the second argument of the loss function.
            loss_fn: of (output, targets); 0-d.
        """

    def publish(self, loss: Tensor) -> None:
        """Give ranks that did not compute a loss its value, after backward."""

    def in_pieces(self) -> int:
        """Learn that calls get pieces of a batch; return into how many parts each is cut."""


class Joinable(Protocol):
    """What ranks do for each other where some run out of batches earlier than others."""

    @property
    def synchronizes(self) -> bool:
        """Whether a backward now synchronises gradients, and others must take part."""

    def lead(self, source: int, *, gradients: bool) -> None:
        """Let one rank with a batch lead those without: its buffers count. Collective.

        Args:
            source: the global rank.
            gradients: take over those that it has, before a window begins, or after one.
        """

    def stand_in(self) -> None:
        """Take part, without a batch, in a backward that synchronises the others' gradients."""

    def catch_up(self, source: int) -> None:
        """Take over the training state of one rank, which went on when others stood in.

        Args:
            source: the global rank.
        """


class Pace(NamedTuple):
    """Which ranks take their steps together; by default all do.

    Attributes:
        apart: whether ranks of ``dp`` take steps by themselves: their norms and weights differ.
        ranks: those that wait for each other at every step, None for all. Nobody waits for the
            other ranks at a step, so no rank learns there what they have found.
        later: those of ``ranks`` at later steps, where the first steps wait for all ranks.
        states: the ranks that have all of an optimizer's state together, None for all.
        forwards: whether ranks of ``dp`` need each other in a forward: they must run the same ones.
        backwards: whether they need each other in the backward of each micro-batch of a window.
        begun: whether a step begins in backward, after which it cannot be left out.
        waits: whether gradients of backwards inside ``accumulating()`` wait for one that
            synchronises; the same on every rank.
    """

    apart: bool = False
    ranks: Axis | None = None
    later: Axis | None = None
    states: Axis | None = None
    forwards: bool = False
    backwards: bool = False
    begun: bool = False
    waits: bool = False


class Gradients(ABC):
    """The gradients of a prepared model, from the backward to the step."""

    @abstractmethod
    def __call__(self, only: Only = None) -> Iterator[Tensor]:
        """Yield the pieces of gradient that the optimizers will read on this rank.

        The facade scales, clamps and checks them in place. Together the ranks yield every element
        at least once.

        Args:
            only: the parameters whose gradients are wanted; None means all.
        """

    def scale(self, factor: float) -> None:
        """Multiply all gradients, also gradients that wait to be sent.

        Args:
            factor: the same on every rank.
        """
        pieces = list(self())
        if pieces:
            torch._foreach_mul_(pieces, factor)

    def will_scale(self, factor: float) -> None:
        """Learn the factor of ``scale`` after the synchronised backward that comes.

        By default the sums of gradients do not depend on it.
        """
        return

    @abstractmethod
    def clip(self, max_norm: float, norm_type: float = 2.0, *, only: Only = None) -> Tensor:
        """Scale gradients to a global norm of at most max_norm.

        Args:
            max_norm: the largest norm allowed; infinity measures without scaling.
            norm_type: 2.0 for Euclid, infinity for the largest element.
            only: the parameters whose gradients count and are scaled; None means all.

        Returns:
            The norm before clipping, 0-d, the same on all ranks.
        """

    def step_decided(self, *, taken: bool) -> None:
        """Note whether optimizers are about to step with the gradients at hand.

        The facade calls it on every rank, before each step, with the same answer. Sums of gradients
        that keep errors go back to those of before a step that is skipped; by default none do.

        Args:
            taken: False if all ranks skip the step, as ``on_nonfinite: skip`` says.
        """
        return


class Strategy(Outline[ConfigT]):
    """One way of spreading a training step over the ranks of a mesh.

    Attributes:
        pipeline: the stages that a batch goes through, once the model is prepared; None where a
            rank's forward computes all of it.
        gradients: those of the model, once it is prepared.
        state: what ranks hold, show, save and load of the model, once it is prepared.
    """

    pipeline: Pipeline | None = None
    gradients: Gradients
    state: TrainingState

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse(cls, _GONE)

    def __init__(self, config: ConfigT, run: Run) -> None:
        self.config = config
        self.run: Run = run

    @classmethod
    def planning(cls) -> Planning:
        """Return what the strategy says before a run; by default it has one form, and no plan."""
        return Planning(cls)

    @abstractmethod
    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Take over a model and the optimizers that hold its parameters (0 to many).

        The facade has already checked that all ranks hold the same names, shapes and dtypes, and
        moved the model to the rank's device, but for tensors that ``materialize`` left on meta. An
        optimizer over parameters of several models is handed to the strategy of each.
        """

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Give a model that was built on the meta device its values, just before ``prepare``.

        By default each parameter and buffer gets its whole values on the rank's device. A strategy
        that shards may keep the source and ask for one tensor at a time in ``prepare``; the source
        knows the same values on every rank, and raises UsageError for an unknown tensor.
        """
        fill(model, meta_tensors(model), source, self.run.world.device)

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Take over an optimizer that was prepared after its model.

        Args:
            optimizer: holds parameters of the prepared model.

        Returns:
            The optimizer that steps in its place, as of ``prepare``.

        Raises:
            UsageError: the strategy must know it together with the model.
        """
        raise UsageError(
            f"{type(self).__name__} cannot take an optimizer after its model was prepared, found "
            f"{type(optimizer).__name__}; pass both to one call: prepare(model, optimizer)"
        )

    @abstractmethod
    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward from a 0-d loss and synchronise the gradients.

        Inside ``accumulating()`` they stay local. Must work with a loss that does not reach this
        model on some rank. The options are those of ``Tensor.backward``, such as ``retain_graph``.
        """

    @property
    def pace(self) -> Pace:
        """Which ranks take their steps together."""
        return Pace()

    def take_links(self, links: LinkMethods) -> None:
        """Go on with methods that were chosen between two steps, the same on all ranks."""
        self.run = replace(self.run, links=links)

    @classmethod
    @abstractmethod
    def cost(cls, config: ConfigT, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes held per rank and the bytes rank 0 sends per optimizer step."""

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Context in which backward keeps gradients local: no communication inside.

        Inside it, ``accumulating(False)`` synchronises again: the innermost context around backward
        decides.
        """
        return nullcontext()

    def running(self) -> AbstractContextManager[None]:
        """Context in which a strategy around this one runs the model's forward without calling it.

        Hooks of the modules inside run as ever, those of the model itself do not.
        """
        return nullcontext()

    @property
    def joinable(self) -> Joinable | None:
        """How a rank stands in for others that have batches left; None: it cannot."""
        return None

    def close(self) -> None:
        """Take hooks off and end threads, also after a failed prepare: the model is ordinary."""


class StrategyAround(Strategy[ConfigT]):
    """A strategy around another one, to which it leaves all that it does not do in its own way.

    ``state`` (a ``drivetrain.saved_state.StateAround``) and ``gradients`` are each subclass's own,
    and so is ``take_links``: what crosses a slow link may be sent by one of both alone.

    Args:
        config: the options.
        run: of the whole strategy.
        inner: the strategy inside.
    """

    def __init__(self, config: ConfigT, run: Run, inner: Strategy[Any]) -> None:
        super().__init__(config, run)
        self._inner = inner

    @property
    def pace(self) -> Pace:
        """Which ranks of the strategy inside take their steps together."""
        return self._inner.pace

    def materialize(self, model: nn.Module, source: WeightSource) -> None:
        """Let the strategy inside give the model its values."""
        self._inner.materialize(model, source)

    def running(self) -> AbstractContextManager[None]:
        """Context in which a strategy around this one runs the model's forward."""
        return self._inner.running()
