"""FSDP: the step as a table. Every parameter is cut by rows, and gathered unit by unit.

Paper: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
section 3: units and their life (3.2.1), prefetching (3.3.2, 3.3.3), hybrid sharding (3.2.2); after
ZeRO stage 3 (Rajbhandari et al., SC 2020, section 5.3).

One step of N ranks, each of which owns some rows of every parameter::

    forward    all-gather a unit before its module, and the next ones ahead; free it after its
               module (sharding: grad keeps it until the optimizer steps)
    backward   all-gather it again where autograd reads it; free it when its module's backward is
               over
               reduce-scatter each unit's gradients as soon as the last of them has come
               (sharding: hybrid adds the rows up over groups of ranks, once per window; with
               exchange: momentum the momenta of Adam cross between groups instead)
    step       the user's optimizer steps this rank's rows; then every unit is freed

How FSDP cuts a model into units and parameters into rows, and the options for it.

A unit is named by its key: the name of the module whose forward uses its parameters. Parameters of
no unit belong to ROOT, the rest of the model. There are four ways to choose:

- auto: every repeated block, every large layer outside of blocks
- class: every module of some classes, the innermost where they nest
- size: modules from the inside out, as soon as so many elements are in no unit yet
- function: the modules that a function of the user's returns

Auto and size need names and shapes only, so a cost is estimated where there is no model. With the
model they leave out modules without a forward, which the names of a list's members tell as well.

Inside of drivetrain shards are plain tensors, so optimizers pay nothing for the description.
"""

import difflib
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from drivetrain.collectives import Communicator, Route
from drivetrain.collectives.facts import gather_facts
from drivetrain.compression.communicator import route_linked, route_of_replicas
from drivetrain.compression.one_bit_adam import frozen_adam
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import ConfigError, RankMismatchError, UsageError
from drivetrain.log import get_logger
from drivetrain.model.guard import Unlisted
from drivetrain.model.modules import clean_name, named_parameters
from drivetrain.parallel.estimate import Lines
from drivetrain.parallel.layout import (
    ROOT,
    ParameterSlot,
    UnitLayout,
    arrange,
    in_order_of_backward,
    units_of_keys,
)
from drivetrain.parallel.placement import Placement, Ranks
from drivetrain.parallel.strategy import ShardedPlanning, ShardedState, ShardedStrategy
from drivetrain.parallel.unit import FlatParameter
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.simulator.contract import Sharing
from drivetrain.simulator.step import SimulatedRun
from drivetrain.strategy import Form, Planning, Prepared, Run
from drivetrain_fsdp.options import FsdpConfig, FsdpOutline

# --- modules of a model, found by the names of its parameters: which modules run a forward ---

# A unit is gathered by the hooks of a module, and they run only where something calls the module.
# Nothing calls a ``ModuleList``, nor the output projection inside of ``nn.MultiheadAttention``,
# which reads that projection's weights itself. Where the model is not there, its names tell.


_ATTENTION = {"in_proj_weight", "q_proj_weight"}
"""Every ``nn.MultiheadAttention`` has a parameter of such a name, and so has every copy."""

_PARAMETRIZED = "parametrizations"
"""The place where ``torch.nn.utils.parametrize`` keeps the sources of a layer's weight."""


def parent(name: str) -> str:
    """Return the name of the module around a module or parameter; the model is ROOT."""
    return name.rpartition(".")[0]


def upwards(name: str) -> Iterator[str]:
    """Yield a module's name and the names of the modules around it, the model last."""
    while name:
        yield name
        name = parent(name)
    yield ROOT


def holds(module: str, name: str) -> bool:
    """Return whether a module equals or contains another module, or a parameter, by names."""
    return module in (ROOT, name) or name.startswith(f"{module}.")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once with its clean name; a compiled one before its inside, with one name.

    A module that stands in several places comes under its first name.
    """
    for name, module in model.named_modules():
        yield clean_name(f"{name}.")[:-1], module


class Tree:
    """The modules of a model that hold parameters.

    Args:
        parameters: clean names of parameters.
        model: knows which modules have no forward; None leaves the question to the names.
    """

    def __init__(self, parameters: Iterable[str], model: nn.Module | None = None) -> None:
        self._own: dict[str, set[str]] = {ROOT: set()}  # names of parameters right in a module
        self._inside: dict[str, set[str]] = {ROOT: set()}  # names of all that is right in it
        for name in parameters:
            for inner, outer in itertools.pairwise(upwards(name)):
                self._own.setdefault(outer, set())
                self._inside.setdefault(outer, set()).add(inner.rpartition(".")[2])
            self._own[parent(name)].add(name.rpartition(".")[2])
        self._silent = set() if model is None else _without_forward(model)

    @property
    def modules(self) -> list[str]:
        """Names of the modules, none before one around it."""
        return sorted(self._own, key=lambda name: len(list(upwards(name))))

    def is_called(self, module: str) -> bool:
        """Return whether something calls a module, as far as can be known."""
        return module == ROOT or not (
            module in self._silent
            or any(own.isdecimal() for own in self._own.get(module, ()))  # a ParameterList
            or _PARAMETRIZED in module.split(".")
            or any(_ATTENTION & self._own.get(outer, set()) for outer in upwards(parent(module)))
        )

    def is_list(self, module: str) -> bool:
        """Return whether a module is a list by its names: a ``ModuleList`` or ``Sequential``."""
        inside = self._inside.get(module, set())
        return bool(inside) and all(name.isdecimal() for name in inside)

    def user(self, around: Iterable[str]) -> str:
        """Return the first of some modules, from the inside out, that is called and is no list."""
        called = (name for name in around if self.is_called(name) and not self.is_list(name))
        return next(called, ROOT)


def _without_forward(model: nn.Module) -> set[str]:
    return {
        name
        for name, module in named_modules(model)
        if getattr(getattr(module, "forward", None), "__func__", None) is nn.Module.forward
    }


# --- the choice of units ---


_SHOWN = 12


def unit_keys(
    specs: Sequence[TensorSpec], config: FsdpConfig, model: nn.Module | None = None
) -> list[str]:
    """Return the key of the unit that each parameter belongs to, in order.

    Args:
        specs: distinct parameters under their first names, those of a compiled model as well.
        config: says how units are chosen.
        model: needed for ``class`` and ``function``.

    Raises:
        UsageError: no module is of a named class; the function cannot be imported or called,
            returns objects that are no modules of the model, or has a parameter in two units; the
            model is missing.
    """
    names = [clean_name(spec.name) for spec in specs]
    tree = Tree(names, model)
    if config.units == "auto":
        return _by_blocks(names, specs, tree, config.unit_from)
    if config.units == "size":
        return _by_size(names, specs, tree, config.unit_from)
    if model is None:
        raise UsageError(
            f"expected a model to choose units by {config.units}, found sizes only; choose them by "
            "auto or size here"
        )
    if config.units == "class":
        classes = [name for each in config.unit_classes.split(",") if (name := each.strip())]
        return _by_class(names, tree, classes, model)
    return _by_function(names, tree, config.unit_function, model)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of a rank: the key of each parameter's unit, or why there is none."""

    keys: list[str]
    failure: str


def agreed_keys(
    choose: Callable[[], list[str]], names: Sequence[str], config: FsdpConfig, axis: Axis
) -> list[str]:
    """Return the key of the unit that each parameter belongs to, in order.

    Collective where a function chooses: ranks that agree on the model agree on all other choices.

    Args:
        choose: returns this rank's keys.
        names: the parameters.
        config: says how units are chosen.
        axis: all must agree.

    Raises:
        RankMismatchError: on every rank, when keys differ or only others could choose.
        Exception: of this rank's function.
    """
    if config.units != "function":
        return choose()
    failure: Exception | None = None
    keys: list[str] = []
    try:
        keys = choose()
    except Exception as error:
        failure = error  # raised below, when the other ranks know
    mine = _Choice(keys, str(failure) if failure else "")
    told = gather_facts(mine, _Choice, doing="the comparison of units", group=axis)
    if failure is not None:
        raise failure
    expected = f"expected {config.unit_function} to choose the same units on every rank, found "
    for rank, other in zip(axis.ranks, told, strict=True):
        if other.failure:
            raise RankMismatchError(
                f"{expected}that it failed on rank {rank}: {other.failure}; see that rank's "
                "own error"
            )
        for name, first, key in zip(names, told[0].keys, other.keys, strict=True):
            if first != key:
                raise RankMismatchError(
                    f"{expected}{name!r} in {first or 'the rest of the model'} on rank "
                    f"{axis.ranks[0]} and in {key or 'the rest of the model'} on rank {rank}; let "
                    "it depend on nothing but the model"
                )
    return keys


def cut_model(
    specs: Sequence[TensorSpec],
    keys: Sequence[str],
    precision: Precision,
    size: int,
    devices: Sequence[Hashable] | None = None,
) -> list[UnitLayout]:
    """Cut parameters into units and rows, in the order in which backward usually reaches them.

    Args:
        specs: the parameters in registration order.
        keys: the unit of each.
        precision: which dtypes they get.
        size: number of ranks that share them.
        devices: device of each parameter; only equal ones share a unit.
    """
    units = units_of_keys(specs, range(len(specs)), keys, precision, devices)
    return in_order_of_backward(
        (
            UnitLayout(
                key,
                tuple(arrange([specs[i] for i in kind], precision, size, "rows") for kind in kinds),
                sharded=True,
            )
            for key, kinds in units
        ),
        specs,
    )


def describe(keys: Sequence[str], specs: Sequence[TensorSpec]) -> str:
    """Return a line for the log: how many units, the largest, the rest, and the frozen share.

    Args:
        keys: the unit of each parameter.
        specs: the parameters.
    """
    sizes: Counter[str] = Counter()
    for key, spec in zip(keys, specs, strict=True):
        sizes[key] += spec.numel
    total, frozen = sizes.total(), sum(spec.numel for spec in specs if not spec.trainable)
    rest = sizes.pop(ROOT, 0)
    if sizes:
        largest, numel = max(sizes.items(), key=lambda pair: pair[1])
        units = f"{len(sizes)} unit{'s' if len(sizes) > 1 else ''}, the largest {largest} with "
        text = f"{units}{_elements(numel)} elements; {_elements(rest)} in the rest of the model"
    else:
        text = f"one unit, the whole model with {_elements(rest)} elements"
    if not frozen:
        return text
    percent = 100 if frozen == total else min(99, max(1, round(100 * frozen / total)))
    return f"{text}; {percent} % frozen, which get no gradients"


def _elements(numel: int) -> str:
    for unit, word in ((10**9, "G"), (10**6, "M")):
        if numel >= unit:
            return f"{numel / unit:.1f} {word}"
    return f"{numel:,}"


def _by_blocks(
    names: Sequence[str], specs: Sequence[TensorSpec], tree: Tree, size: int
) -> list[str]:
    users = [tree.user(upwards(parent(name))) for name in names]
    sizes: Counter[str] = Counter()
    for user, spec in zip(users, specs, strict=True):
        sizes[user] += spec.numel
    return [
        _block(name, tree) or (user if sizes[user] >= size else ROOT)
        for name, user in zip(names, users, strict=True)
    ]


def _block(name: str, tree: Tree) -> str:
    """Return the outermost member of a list that holds a parameter; ROOT when there is none."""
    members = (m for m in upwards(parent(name)) if m.rpartition(".")[2].isdecimal())
    called = [member for member in members if tree.is_called(member)]
    return called[-1] if called else ROOT


def _by_size(names: Sequence[str], specs: Sequence[TensorSpec], tree: Tree, size: int) -> list[str]:
    keys = [ROOT] * len(names)
    waiting: dict[str, list[int]] = {}  # parameters in no unit yet, by the module that is asked
    for index, name in enumerate(names):
        waiting.setdefault(parent(name), []).append(index)
    for module in reversed(tree.modules):
        members = waiting.pop(module, [])
        large = sum(specs[index].numel for index in members) >= max(size, 1)
        if large and tree.is_called(module) and not tree.is_list(module):
            for index in members:
                keys[index] = module
        elif module != ROOT:
            waiting.setdefault(parent(module), []).extend(members)
    return keys


def _by_class(
    names: Sequence[str], tree: Tree, classes: Sequence[str], model: nn.Module
) -> list[str]:
    holders = set(tree.modules)
    for name, module in named_modules(model):
        if any(isinstance(value, Unlisted) for value in vars(module).values()):
            holders.update(upwards(name))  # a class may be on other stages of a pipeline only
    kinds = {
        name: type(module)  # of a compiled module the inside's, which comes later
        for name, module in named_modules(model)
        if name in holders and tree.is_called(name)
    }
    ancestors = {name: {base.__name__ for base in kind.__mro__} for name, kind in kinds.items()}
    for wanted in classes or ("",):
        if not any(wanted in own for own in ancestors.values()):
            raise UsageError(_no_such_class(wanted, [kind.__name__ for kind in kinds.values()]))
    chosen = {name for name, own in ancestors.items() if own & set(classes)}
    return [next((m for m in upwards(parent(n)) if m in chosen), ROOT) for n in names]


def _no_such_class(wanted: str, there: Iterable[str]) -> str:
    counts = Counter(there)
    near = difflib.get_close_matches(wanted, counts, n=3)
    order = [*near, *(name for name in counts if name not in near)]
    shown = ", ".join(f"{name} ({counts[name]})" for name in order[:_SHOWN])
    more = f" and {len(order) - _SHOWN} more" if len(order) > _SHOWN else ""
    return (
        "expected the class of a module that is called and holds parameters (tied ones count where "
        f"they come first), found {wanted!r}; name classes of this model, which has so many "
        f"modules of each: {shown}{more}"
    )


def _by_function(names: Sequence[str], tree: Tree, path: str, model: nn.Module) -> list[str]:
    units = _returned(path, tree, model)
    label = {id(p): clean_name(name) for name, p in model.named_parameters()}
    keys: dict[str, str] = {}
    for unit, module in units.items():
        for parameter in module.parameters():
            name = label[id(parameter)]
            other = keys.setdefault(name, unit)
            if other != unit:
                raise UsageError(_in_two_units(path, name, other, unit))
    return [keys.get(name, ROOT) for name in names]


def _in_two_units(path: str, name: str, one: str, other: str) -> str:
    if holds(one, other) or holds(other, one):
        reason, way_out = "one is inside of the other", "return the inner ones only"
    else:
        reason = "they share it"
        way_out = "return one module around both of them, or leave at least one of them out"
    return (
        f"expected units of {path} that share no parameter, found {name!r} in {one or 'the model'} "
        f"and in {other or 'the model'}: {reason}; {way_out}"
    )


def _returned(path: str, tree: Tree, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that the user's function returns, by name and in its order."""
    found = _function(path)(model)
    expected = f"expected {path} to return modules of the model that it is called with, found "
    if not isinstance(found, Iterable):
        raise UsageError(f"{expected}{_kind(found)}; return a list of modules")
    names = {id(module): name for name, module in named_modules(model)}
    units = {}
    for module in found:
        name = names.get(id(module))
        if name is None:
            outside = " that is not in this model" if isinstance(module, nn.Module) else ""
            raise UsageError(
                f"{expected}{_kind(module)}{outside}; return modules, such as model.layers[0]"
            )
        if not tree.is_called(name):
            raise UsageError(
                f"{expected}{name!r}, {_kind(module)} that nothing calls, so nothing would gather "
                "it; return the modules inside of it that are called, or the one around it"
            )
        units[name] = module
    return units


def _kind(thing: Any) -> str:
    return "None" if thing is None else f"an object of class {type(thing).__name__}"


def _function(path: str) -> Callable[[nn.Module], Any]:
    """Import a function.

    Raises:
        UsageError: names the missing part.
    """
    home, _, name = path.partition(":")
    if not all(word.isidentifier() for word in (*home.split("."), name)):
        raise UsageError(
            f"expected a function as 'package.module:name', found {path!r}; write the module "
            "that Python imports, a colon and the function's name, or '__main__:name' for one in "
            "the training script"
        )
    try:
        module = importlib.import_module(home)
    except ImportError as error:
        raise UsageError(
            f"expected a module to import the function of {path!r} from, found {error}; install "
            "it, put its folder into PYTHONPATH, or write '__main__' for the training script"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, own, n=1)
        hint = f", of which {near[0]!r} is the nearest" if near else ""
        kind = _kind(function) if hasattr(module, name) else "nothing of that name"
        raise UsageError(
            f"expected a function {name!r} in {home}, found {kind}; name one that is defined "
            f"there{hint}"
        )
    return function  # type: ignore[no-any-return]


# --- FSDP ---

logger = get_logger(__name__)


class FsdpPlanning(ShardedPlanning):
    """Plans of FSDP, where ``shard_group`` ranks divide a copy."""

    layout_keys: ClassVar[Mapping[str, str]] = {
        **ShardedPlanning.layout_keys,
        "shard_group": "shard_size",
    }

    def candidates(self, world: World) -> Sequence[Form]:
        """Return division over all ranks, and inside of each of several hosts."""
        inside = world.spans_hosts and world.island_size > 1
        return [Form(), *([Form({"sharding": "hybrid"})] if inside else [])]

    def options_of_layout(self, keys: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the options of division inside of groups, where a size of groups is given."""
        options = super().options_of_layout(keys)
        return {"sharding": "hybrid", **options} if "shard_size" in options else options


class RowsState(ShardedState):
    """The state of a model that is divided by rows."""

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of all parameters as torch's DTensors. Collective.

        In the order of the model's state dict, whose names of tied parameters share one.

        Raises:
            UsageError: values written into them would not reach secondary shards.
        """
        strategy, place = self._strategy, self._placement
        strategy.gather.values_changed()  # what is written must not hide behind whole values
        place.wait_for_steps()  # a step may still be on its way into them
        shards = as_dtensors(place, self._ranks, strategy.run.world.device)
        slots, named = place.slots, strategy.model.named_parameters(remove_duplicate=False)
        return {clean_name(name): shards[slots[p].name] for name, p in named if p in slots}


class Fsdp(FsdpOutline, ShardedStrategy[FsdpConfig]):
    """Parameters, gradients and optimizer state divided by rows, unit by unit."""

    def __init__(self, config: FsdpConfig, run: Run) -> None:
        config.check()
        self._keys: dict[str, str] = {}  # of the unit of each parameter, by name
        super().__init__(config, run)
        self.state = RowsState(self)
        replicas = self.lines(config, run).replicas
        far = replicas is not None and replicas.levels is not None
        self.adam = frozen_adam("fsdp", config.exchange, run.links, far=far)
        if self.adam:
            self._made.enter_context(closing(self.adam))

    @classmethod
    def sharing(cls, config: FsdpConfig, run: SimulatedRun) -> Sharing:
        """Return what the ranks divide, all of them or groups."""
        hybrid = config.sharding == "hybrid"
        group = (config.shard_size or run.together("dp")) if hybrid else 0
        return replace(super().sharing(config, run), group=group)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans that may divide the model inside of groups."""
        return FsdpPlanning(cls, cls.sharing)

    # --- units of rows ---

    @classmethod
    def plan(
        cls,
        config: FsdpConfig,
        model: ModelSpec,
        run: Run,
        devices: Sequence[Hashable] | None = None,
    ) -> list[UnitLayout]:
        """Cut the model into units of whole modules, and each parameter into rows."""
        by_names = model.module is None and config.units in ("class", "function")
        # An estimate: these need the model itself.
        chosen = replace(config, units="auto") if by_names else config
        keys = unit_keys(model.parameters, chosen, model.module)
        size = cls.lines(config, run).sharing.axis.size
        return cut_model(model.parameters, keys, run.precision, size, devices)

    def _cut(
        self, specs: Sequence[TensorSpec], devices: Sequence[Hashable] | None = None
    ) -> list[UnitLayout]:
        """Cut the model as it was chosen once, by all ranks alike."""
        keys = [self._keys[spec.name] for spec in specs]
        size = self.ranks.sharing.size
        return cut_model(specs, keys, self.run.precision, size, devices)

    # --- groups of ranks ---

    @classmethod
    def lines(cls, config: FsdpConfig, run: Run) -> Lines:
        """Return all ranks, the ranks that divide the model, and the ranks with the same rows.

        Raises:
            ConfigError: momenta shall cross between groups, and there is one group on all hosts.
        """
        mesh, everyone = run.mesh, route_linked(run.mesh, "dp", run.world, run.links)
        size = config.shard_ranks(mesh, run.world)
        if size == everyone.axis.size:
            if config.exchange == "momentum" and everyone.levels is not None:
                raise ConfigError(
                    "fsdp: expected a group of ranks on each host with exchange: momentum, found "
                    f"one group of all {size} ranks; set shard_size to the ranks of a host, or "
                    "take exchange: gradients"
                )
            return super().lines(config, run)
        near, across = mesh.neighbors("dp", size), mesh.across("dp", size)
        return Lines(everyone, Route(near), route_of_replicas(across, run.links))

    def connect(self) -> Ranks:
        """Connect ``dp``; with replicas, the groups of neighbors, and the lines across them."""
        run = self.run
        mesh = run.mesh
        size = self.lines(self.config, run).sharing.axis.size  # an error comes first
        if size == mesh["dp"].size:
            return Ranks.in_queues(run, keeping=self.config)
        near = mesh.start_neighbors("dp", size, run.world)
        across = mesh.start_across("dp", size, run.world)
        return Ranks.in_queues(run, near, across)

    def describe_groups(self) -> str:
        """Return a line about who divides the model, and who owns the same rows."""
        sharing, size = self.ranks.sharing.axis, self.ranks.everyone.size
        groups = size // sharing.size
        ranks = ", ".join(map(str, sharing.ranks))
        text = f"hybrid: groups x ranks = {groups} x {sharing.size}, this one has ranks {ranks}"
        if groups == 1:
            return f"{text}; there are no replicas, as with sharding: full"
        if sharing.size == 1:
            return f"{text}; nothing is divided: set shard_size, or take a strategy that replicates"
        return text

    # --- before the first step ---

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Choose the units, the same on all ranks, and prepare the model's step."""
        specs = [TensorSpec.of(name, p) for name, p in named_parameters(model).items()]
        keys = agreed_keys(
            partial(unit_keys, specs, self.config, model),
            [spec.name for spec in specs],
            self.config,
            self.run.mesh["dp"],
        )
        self._keys = {spec.name: key for spec, key in zip(specs, keys, strict=True)}
        prepared = super().prepare(model, optimizers)
        logger.info(f"units of {type(model).__name__}: {describe(keys, specs)}")
        if self.config.sharding == "hybrid":
            undivided = 1 == self.ranks.sharing.axis.size < self.ranks.everyone.size
            (logger.warning if undivided else logger.info)(self.describe_groups())
        return prepared


# --- the shards as torch's DTensors ---


def as_dtensors(placement: Placement, ranks: Ranks, device: torch.device) -> dict[str, DTensor]:
    """Return every parameter's shard as a DTensor that shares its memory. Collective.

    A parameter is sharded along the dim outermost in memory among the dims of more than one index,
    as ``torch.chunk`` would cut the parameter. A 0-d parameter is replicated: only the first rank's
    writes count.

    Args:
        placement: the parameters.
        ranks: the ranks of the model.
        device: of the shards.

    Returns:
        By name, in the dtype that the optimizer updates; global shapes and strides.

    Raises:
        UsageError: the axis has one rank, so there is no process group to describe; or there are
            secondary shards, which what is written into DTensors would not reach.
    """
    if ranks.secondary is not None:
        raise UsageError(
            "expected secondary: none with DTensors, found host: values that a tool writes into "
            "them would not reach the secondary shards; leave the option out, or take "
            "accelerator.get_state_dict(model) and accelerator.save_model"
        )
    mesh = _device_mesh(ranks, device.type)
    replicated = [Replicate()] * (mesh.ndim - 1)
    found = {}
    for slot in placement:
        flat = placement.flat_of(slot)
        local = _piece(slot, flat) if slot.owned_numel else _nothing(slot, flat, ranks.sharing)
        along = Shard(slot.outer_dim) if slot.shape else Replicate()
        if not slot.shape:
            local = _everywhere(local, slot, flat, ranks.sharing)
        found[slot.name] = DTensor.from_local(
            local.detach(),
            mesh,
            [*replicated, along],
            run_check=False,
            shape=torch.Size(slot.shape),
            stride=slot.strides,
        )
    return found


def _piece(slot: ParameterSlot, flat: FlatParameter) -> Tensor:
    """Return this rank's rows in memory."""
    tensor = flat.shard.tensor
    if tensor is None or flat.masters_left:
        raise UsageError(
            f"expected the rows of {slot.name!r} in memory, found that a store keeps them; take "
            "model.state_dict(), or leave offload.params out and take offload.optimizer: cpu"
        )
    return slot.piece(tensor)


def _device_mesh(ranks: Ranks, device_type: str) -> DeviceMesh:
    sharing = ranks.sharing.axis
    if sharing.group is None:
        raise UsageError(
            f"expected several ranks that divide the model for DTensors, found {sharing.size}, "
            "which has whole tensors: take model.state_dict()"
        )
    if ranks.replicas is None:
        return DeviceMesh.from_group(sharing.group, device_type, mesh_dim_names=("shard",))
    replicas = ranks.replicas.axis
    return DeviceMesh.from_group(
        [replicas.group, sharing.group],  # type: ignore[list-item]  # both were started
        device_type,
        mesh=torch.tensor(ranks.everyone.axis.ranks).view(replicas.size, sharing.size),
        mesh_dim_names=("replicate", "shard"),
    )


def _nothing(slot: ParameterSlot, flat: FlatParameter, sharing: Communicator) -> Tensor:
    """Return the rows of a rank that owns no element: none, unless rows have no elements."""
    rows = 0
    if slot.shape and not slot.numel:
        total = slot.shape[slot.outer_dim]
        each = -(-total // sharing.size)
        rows = max(min(each, total - sharing.rank * each), 0)
    shape = [rows if dim == slot.outer_dim else size for dim, size in enumerate(slot.shape)]
    return flat.values.new_empty(shape, dtype=slot.master)


def _everywhere(
    local: Tensor, slot: ParameterSlot, flat: FlatParameter, sharing: Communicator
) -> Tensor:
    """Return a 0-d parameter's value on all ranks: on its owner, the parameter's own memory."""
    value = local.reshape(()) if slot.owned_numel else _nothing(slot, flat, sharing).new_zeros(())
    sharing.broadcast(value, 0, label=f"the value of {slot.name}").wait()
    return value
