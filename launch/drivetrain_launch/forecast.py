"""A run before anything starts: its model, the bytes that strategies promise, and the best of them.

The run is laid out without a process group, as rank 0 will see it, and refused or promised bytes: a
promise is one row of bytes for one model and one form of a strategy. Models come from sizes, a
configuration of transformers, a function, or a script, without values where possible.

Every installed strategy promises the bytes that it holds and sends for the user's model on the
user's ranks (``Strategy.cost``); the proposal compares these numbers, and knows no strategy.
"""

import importlib
import inspect
import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.compression.communicator import declared_islands
from drivetrain.compression.methods import LinkMethods
from drivetrain.config import Layer, ValueOrigin
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.cost import Cost, ModelSpec, TensorSpec, Traffic
from drivetrain.data.examples import Candidate, batches_as_arguments, first_rows, guessed_inputs
from drivetrain.errors import ConfigError, DrivetrainError, refusing
from drivetrain.hardware.sizes import DEVICES, GIB, parameter_count, size_text
from drivetrain.registry import Registry, strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.simulator.traced import ROWS, traced_model
from drivetrain.simulator.transformer import SimulatedModel
from drivetrain.strategy import Run, find_strategy
from drivetrain_launch.ranks.placement import check_size

# --- the run as rank 0 will see it, laid out without a process group ---

ACCELERATOR = "cuda"
"""A kind of device with memory of its own; costs depend on no more than this."""

LAYERS = 1000
EXAMPLE = "1e9 parameters in fp32 (1000 tensors of 1000 x 1000) with Adam"
"""The model in words: a dry run does not load the user's model."""


def plan(resolved: Resolved, ranks: int, *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with so many ranks on each host."""
    hosts = planned_world(ranks, resolved.run.launch.nnodes).hosts
    return plan_on(resolved, hosts, on_accelerators=on_accelerators)


def plan_on(resolved: Resolved, hosts: Sequence[str], *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with the host of each rank; hosts may be unequal."""
    world = World(size=len(hosts), local_size=hosts.count(hosts[0]), hosts=tuple(hosts))
    world = declared_islands(world, resolved.run.links.hardware)
    if on_accelerators:
        world = replace(world, device=torch.device(ACCELERATOR))
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    axes = kind.axes(options, world.size)
    return Run(
        world=world,
        mesh=Mesh.plan(axes, world),
        precision=Precision.configured(resolved.run),
        accumulation=resolved.run.accumulation,
        traffic=Traffic(),
        links=LinkMethods.configured(resolved.run.links, undoable=resolved.run.skips_steps),
    )


def planned_world(ranks: int, nodes: int) -> World:
    """Return the world of a run as rank 0 will see it, with as many ranks on each host.

    Raises:
        ConfigError: as ``check_size``.
    """
    check_size(ranks, nodes)
    hosts = tuple(f"host {host}" for host in range(nodes) for _ in range(ranks))
    return World(size=len(hosts), local_size=ranks, hosts=hosts)


def example_model() -> ModelSpec:
    """Describe the model for which a strategy's cost is shown."""
    return _of_shapes([MATRIX] * LAYERS)


def _of_shapes(shapes: Sequence[tuple[int, int]]) -> ModelSpec:
    """Describe a model of one parameter of each shape."""
    named = enumerate(shapes)
    return ModelSpec(
        tuple(TensorSpec(f"layers.{i}.weight", shape, torch.float32, True) for i, shape in named)
    )


# --- the promises of all strategies for one model ---


@dataclass(frozen=True, slots=True)
class Promise:
    """The cost of one form of a strategy, or the reason why there is none.

    Attributes:
        form: the strategy with its options.
        cost: bytes that rank 0 holds and sends; nothing where it cannot train the model so.
        refusal: why it cannot; empty where it can.
        name: of the strategy.
        options: of the form.
        exact: whether the form averages gradients as they are, without an approximation.
        between_hosts: bytes that leave a host in a step, as far as they are known.
    """

    form: str
    cost: Cost = Cost()
    refusal: str = ""
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    between_hosts: int = 0


def promises_for(
    model: ModelSpec, resolved: Resolved, ranks: int, *, on_accelerators: bool = True
) -> Iterator[Promise]:
    """Yield the promise of every installed strategy in its forms.

    Args:
        model: its facts.
        resolved: precision, accumulation and hosts of the run; its strategy is one more form where
            somebody has chosen it.
        ranks: of all hosts, which share them equally.
        on_accelerators: whether the ranks compute there, and not on the CPU.
    """
    registry = strategies()
    chosen = "strategy.name" in resolved.origins
    hosts = resolved.run.launch.nnodes
    world = declared_islands(planned_world(ranks // hosts, hosts), resolved.run.links.hardware)
    forms = (
        (name, form)
        for name in registry.choices
        for form in registry.load(name).planning().candidates(world)
    )
    promise = partial(_promise, model, ranks=ranks, on_accelerators=on_accelerators)
    if chosen:
        yield promise(f"{resolved.strategy} (as configured)", resolved)
    for name, each in forms:
        options = dict(each.options)
        origin = ValueOrigin("file", "the form")
        layer = Layer({"strategy": {"name": name, **options}}, {"strategy": origin})
        core = {key: value for key, value in resolved.to_dict().items() if key != "strategy"}
        shown = ", ".join(f"{key} {value}" for key, value in options.items())
        try:
            form = resolve(Layer(core), layer, find_config=registry.find_config)
        except ConfigError as error:
            yield Promise(f"{name} {shown}".strip(), refusal=str(error))
            continue
        if chosen and (resolved.strategy, resolved.strategy_config) == (name, form.strategy_config):
            continue  # that is the form that somebody has chosen
        made = promise(f"{name} {shown}".strip(), form)
        yield replace(made, name=name, options=options, exact=each.exact)


def _promise(
    model: ModelSpec, form: str, resolved: Resolved, *, ranks: int, on_accelerators: bool
) -> Promise:
    hosts = resolved.run.launch.nnodes
    try:
        kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
        run = plan(resolved, ranks // hosts, on_accelerators=on_accelerators)
        kind.check_options(options, run.precision)
        kind.check_links(options, run.links, run.precision)
        cost = kind.cost(options, model, run)
        return Promise(form, cost, between_hosts=run.bytes_between_hosts(cost.sent))
    except DrivetrainError as error:
        return Promise(form, refusal=str(error).splitlines()[0])


CONFIG_FILE = "config.json"
MATRIX = (1000, 1000)
"""The smallest layer of a model of which only the number of parameters is known."""

MOST_LAYERS = 200
"""Layers of such a model; those of larger models have more rows."""

LONGEST = 4096
"""Tokens of a sample of transformers' models that take more, unless ``--seq`` says otherwise."""

FACTORY = re.compile(r"([\w.]+):(\w+)")
"""``module:function``."""

_META = torch.device("meta")


class _Prepared(BaseException):
    """A script has reached ``prepare``; no handler of the script may catch it."""


Reached: TypeAlias = tuple[nn.Module, Sequence[DataLoader[Any]]]
"""The first module with which a script has reached ``prepare``, and the loaders of the call."""


def model_of(source: str, arguments: Sequence[str] = ()) -> ModelSpec:
    """Return the facts of a model.

    Args:
        source: a folder or a ``config.json`` of transformers, a script, ``module:function`` of a
            function that returns a model, or a number of parameters such as 7B.
        arguments: of the script.

    Raises:
        ConfigError: the source is nothing of this kind, or has no model.
    """
    path = Path(source)
    if path.is_dir():
        path /= CONFIG_FILE
    if arguments and path.suffix != ".py":
        raise ConfigError(
            f"found arguments after {source!r}: {' '.join(arguments)}; only a script has arguments"
        )
    if path.suffix == ".json" and path.is_file():
        return ModelSpec.of(of_transformers(path))
    if path.suffix == ".py" and path.is_file():
        return ModelSpec.of(of_script(path, arguments)[0])
    if count := parameter_count(source):
        return of_size(count)
    if FACTORY.fullmatch(source):
        return ModelSpec.of(of_function(source))
    hub = re.fullmatch(r"[\w-]+(?:/[\w.-]+)?", source)
    more = f", or, as nothing is downloaded, give the config.json of {source}" if hub else ""
    raise ConfigError(
        "expected a config.json of transformers or its folder, a script, MODULE:FUNCTION or a "
        f"number of parameters such as 7B, found {source!r}; check the path{more}"
    )


def of_size(parameters: int) -> ModelSpec:
    """Describe a model of which only the number of parameters is known: layers of one shape."""
    rows, columns = MATRIX
    rows = max(rows, parameters // (MOST_LAYERS * columns))
    whole, rest = divmod(parameters, rows * columns)
    shapes = [(rows, columns)] * whole + ([(rest, 1)] if rest else [])
    return _of_shapes(shapes)


def of_transformers(path: Path) -> nn.Module:
    """Return the model of a configuration of transformers, on the meta device.

    Raises:
        ConfigError: transformers is missing, or cannot build it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path}: expected transformers to be installed, found {error}; pip install "
            "transformers"
        ) from error
    expected = f"{path}: expected a configuration of transformers"
    with refusing(expected, "give the config.json of a model"):
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kind = facts.pop("model_type", None)
    if kind is None:
        raise ConfigError(f"{expected} with a model_type, found {', '.join(list(facts)[:5])}")
    try:
        config = transformers.AutoConfig.for_model(kind, **facts)
        (name,) = (config.architectures or [""])[:1]
        architecture = getattr(transformers, name, None)
        make: Any = transformers.AutoModel.from_config if architecture is None else architecture
        with _META:
            return _module(make(config), str(path))
    except Exception as error:
        raise ConfigError(
            f"{path}: transformers cannot build this model: {error}; check the file, or give the "
            "number of parameters"
        ) from error


def of_function(source: str) -> nn.Module:
    """Return the model that ``module:function`` makes, on the meta device.

    Raises:
        ConfigError: there is no such function, or it returns no module.
    """
    module, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot find {module}:{name}: {error}; check the name") from error
    with _META:
        return _module(function(), source)


def of_script(path: Path, arguments: Sequence[str]) -> Reached:
    """Run a script as one process until it prepares a model; its output goes to standard error.

    Raises:
        ConfigError: it ends, or fails, before.
    """
    found: list[Reached] = []
    prepare = Accelerator.prepare

    def note(accelerator: Accelerator, *objects: Any, **settings: Any) -> Any:
        models = [each for each in objects if isinstance(each, nn.Module)]
        if not models:
            return prepare(accelerator, *objects, **settings)
        found.append((models[0], [o for o in objects if isinstance(o, DataLoader)]))
        raise _Prepared

    before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    setattr(Accelerator, prepare.__name__, note)
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
    except _Prepared:
        return found[0]
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        line = line or next((f.lineno for f in reversed(frames) if f.filename == str(path)), "?")
        raise ConfigError(
            f"{path}:{line}: expected accelerator.prepare(model), found before it "
            f"{type(error).__name__}: {error}; give the arguments that the "
            "script needs, correct it, or give the number of parameters"
        ) from error
    finally:
        setattr(Accelerator, prepare.__name__, prepare)
        sys.argv = before
    raise ConfigError(f"{path}: expected accelerator.prepare(model), found a script without it")


def _module(found: Any, source: str) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{source}: expected a torch.nn.Module, found {type(found).__name__}")
    return found


# --- simulated, for a plan ---


def subject_of_config(source: str, seq: int | None) -> SimulatedModel:
    """Return the model of a ``config.json`` of transformers, or of its folder.

    Raises:
        ConfigError: there is no such file, or transformers cannot build the model.
    """
    path = Path(source) / CONFIG_FILE if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise ConfigError(f"--hf: expected a config.json of transformers, found no file {source!r}")
    model = of_transformers(path)
    return traced_model(model, _of_transformers(model, seq))


def subject_of_function(source: str, seq: int | None) -> SimulatedModel:
    """Return the model that ``module:function`` makes.

    Raises:
        ConfigError: there is no such function, it returns no module, or no inputs are known.
    """
    if not FACTORY.fullmatch(source):
        raise ConfigError(f"--model: expected MODULE:FUNCTION, found {source!r}")
    model = of_function(source)
    return traced_model(model, _guesses(model, seq))


def subject_of_script(source: str, arguments: Sequence[str]) -> tuple[SimulatedModel, int]:
    """Return the model with which a script reaches ``prepare``, as its first batch shows it.

    And the samples of a batch of the script's loader; 0 where there is none.

    Raises:
        ConfigError: there is no such file, or the script never reaches ``prepare``.
    """
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"expected a script, found no file {source!r}; check the path")
    model, loaders = of_script(path, arguments)
    examples = [first_rows(loader) for loader in loaders]
    candidates = [*batches_as_arguments(model, examples, cuts=False)]
    batch = next((loader.batch_size or 0 for loader in loaders), 0)
    return traced_model(model, (*candidates, *_guesses(model, None))), batch


def _of_transformers(model: nn.Module, seq: int | None) -> Iterator[Candidate]:
    """Yield tokens by the names of transformers, with labels where the model takes them."""
    config: Any = getattr(model, "config", None)
    names = inspect.signature(type(model).forward).parameters
    length = seq or min(getattr(config, "max_position_embeddings", LONGEST), LONGEST)
    if "input_ids" in names:
        tokens = torch.zeros(ROWS[0], length, dtype=torch.long)
        plain: dict[str, Any] = {"input_ids": tokens}
        if "use_cache" in names:
            plain["use_cache"] = False
        if "labels" in names:
            yield Candidate(f"{length} tokens with labels", (), {**plain, "labels": tokens})
        yield Candidate(f"{length} tokens", (), plain)
    yield from _guesses(model, seq)


def _guesses(model: nn.Module, seq: int | None) -> Iterator[Candidate]:
    """Yield the inputs that the model itself names, then guesses; sequences are of length seq."""
    own = vars(model).get("example_inputs")
    if own is not None:
        yield Candidate.of("example_inputs of the model", own)
        return
    for guess in guessed_inputs(model):
        given = guess.args, dict(guess.kwargs)
        if seq is None and any(map(_is_tokens, tree_leaves(given))):
            problem = "the length of a sequence is not known: give --seq, or a script with a loader"
            yield Candidate(guess.what, problem=problem)
        else:
            yield Candidate(guess.what, *tree_map(lambda leaf: _of_length(leaf, seq), given))


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()


def _of_length(leaf: Any, seq: int | None) -> Any:
    return leaf.new_zeros(leaf.shape[0], seq) if seq and _is_tokens(leaf) else leaf


BILLION = 10**9
"""Parameters of the model for which strategies are compared when its size is not known."""

LEFT_FOR_ACTIVATIONS = 0.25
"""Share of a device that a proposal leaves free: promises do not count activations."""

ALIKE = 0.01
"""Forms whose bytes differ by no larger share send the same, as far as time is concerned."""


SMALLEST = min(DEVICES.values()) * GIB
"""Bytes that every device has, also one of which nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The user's answers before the strategy.

    Attributes:
        resolved: the core's keys, with a number of ranks.
        on_accelerators: whether ranks compute there, and not on the CPU.
        room: bytes for a rank, of its device or of its share of a host's memory; None: unknown.
        beside: bytes of host memory for a rank beside its device; None: unknown, or no device.
        model: number of parameters, or a path; "" is unknown.
        spec: the facts of the model, where a path names it.
        slow: whether the link between hosts is slow.
        approximate: whether gradients may be approximated there by a method without a proof.
    """

    resolved: Resolved
    on_accelerators: bool
    room: int | None
    beside: int | None
    model: str
    spec: ModelSpec | None = None
    slow: bool = False
    approximate: bool = False

    @property
    def size(self) -> str:
        """The size of the model in words."""
        if not self.model:
            return "each billion of parameters"
        return f"{self.model} parameters" if self.spec is None else f"the model of {self.model}"

    def lacking(self, promise: Promise) -> tuple[int, int]:
        """Return the bytes that lack for a form: of a device, and of host memory for a rank."""
        pairs = ((_needed(promise), self.room), (promise.cost.in_host_memory, self.beside))
        device, host = (0 if room is None else max(0, need - room) for need, room in pairs)
        return (device, host) if self.model else (0, 0)

    def memory(self, promise: Promise) -> str:
        """Say what a form holds on a device, and whether that fits."""
        held = f"holds {_gib(promise.cost.on_device)} {self.where}"
        if self.room is not None and self.model:
            return f"{held}, and fits in {_gib(self.room)} with room for activations"
        return f"{held}, and needs {self.needed(promise)} with room for activations"

    def needed(self, promise: Promise) -> str:
        """Say which device a form needs."""
        size = _gib(_needed(promise))
        return f"devices of {size}" if self.on_accelerators else f"{size} {self.where}"

    @property
    def where(self) -> str:
        """The memory of a rank in words."""
        return "on a device" if self.on_accelerators else "of host memory for each rank"


def propose(situation: Situation, registry: Registry) -> tuple[Promise, str]:
    """Compare the promises of all strategies; return one, and the reason without a full stop."""
    run, on_accelerators = situation.resolved.run, situation.on_accelerators
    ranks = int(run.launch.nproc_per_node) * run.launch.nnodes
    promises = promises_for(
        situation.spec or of_size(parameter_count(situation.model) or BILLION),
        situation.resolved,
        ranks,
        on_accelerators=on_accelerators,
    )
    candidates = [promise for promise in promises if not promise.refusal]
    chosen, why = _choose(candidates, situation, registry.default())
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return chosen, f"{why}, for {situation.size} on {where}"


def _needed(promise: Promise) -> int:
    """Return the bytes that a device must have, with those that are left for activations."""
    return int(promise.cost.on_device / (1 - LEFT_FOR_ACTIVATIONS))


def _choose(
    candidates: Sequence[Promise], situation: Situation, default: str
) -> tuple[Promise, str]:
    """Return the best candidate, and why, without the situation that the numbers hold for."""
    fitting = [each for each in candidates if not sum(situation.lacking(each))]
    if not fitting:
        return _closest(candidates, situation)
    known = [each for each in fitting if not each.cost.uncounted] or fitting
    near = [each for each in known if each.cost.on_device == each.cost.total_held] or known
    exact = [each for each in near if each.exact] or near
    allowed = near if situation.approximate else exact
    if situation.slow and any(each.between_hosts for each in allowed):
        return _least_between_hosts(allowed, exact, situation, default)
    usual = next((each for each in exact if each.name == default), None)
    unknown = situation.room is None and situation.model
    if usual is not None and (not unknown or _needed(usual) <= SMALLEST):
        return usual, f"it is the usual strategy, {situation.memory(usual)}"
    if unknown:
        least = min(exact, key=lambda each: each.cost.on_device)
        return least, (
            "of all forms that keep nothing elsewhere it fits on the smallest devices: it "
            f"{situation.memory(least)}"
        )
    best = _fewest(exact, lambda each: each.cost.total_sent, default)
    return best, (
        f"it sends the fewest bytes of all forms that fit, {_gib(best.cost.total_sent)} in a step, "
        f"{situation.memory(best)}"
    )


def _closest(candidates: Sequence[Promise], situation: Situation) -> tuple[Promise, str]:
    """Return the form that lacks the fewest bytes, and how many."""
    least = min(candidates, key=lambda each: sum(situation.lacking(each)))
    device, host = situation.lacking(least)
    lacking = [f"{_gib(device)} {situation.where}"] if device else []
    lacking += [f"{_gib(host)} of host memory for each rank"] if host else []
    return least, (
        f"nothing fits, and this form comes closest: it needs {situation.needed(least)} with room "
        f"for activations, and lacks {' and '.join(lacking)}"
    )


def _least_between_hosts(
    allowed: Sequence[Promise], exact: Sequence[Promise], situation: Situation, default: str
) -> tuple[Promise, str]:
    """Return the form with the fewest bytes between hosts."""
    best = _fewest(allowed, lambda each: each.between_hosts, default)
    why = (
        f"it sends the fewest bytes from a host to the others, {_gib(best.between_hosts)} in a "
        f"step, {situation.memory(best)}"
    )
    if best.exact:
        return best, why
    other = _fewest(exact, lambda each: each.between_hosts, default)
    return best, (
        f"{why}; gradients are approximated, and the best form without that is "
        f"{other.form}, which sends {_gib(other.between_hosts)}"
    )


def _fewest(
    candidates: Sequence[Promise], count: Callable[[Promise], int], default: str
) -> Promise:
    """Return who has the fewest bytes; of those alike the default, or who holds least."""
    fewest = min(map(count, candidates))
    quick = [each for each in candidates if count(each) <= fewest * (1 + ALIKE)]
    return min(quick, key=lambda each: (each.name != default, each.cost.on_device))


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else size_text(count)
