"""The strategy ``auto``: at ``prepare``, the planner's search takes the place of a choice.

Rank 0 looks at the model with the first batch of the loaders, predicts every data-parallel layout
of the installed strategies on the described hardware, and tells the others. Tensor and pipeline
parallelism leave fewer replicas, so that a step would see fewer samples: they are not chosen, and
an error says so where nothing else fits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from drivetrain.collectives.facts import share_facts
from drivetrain.compression.methods import AUTO
from drivetrain.config.outline import EXACT
from drivetrain.cost import Cost, ModelSpec
from drivetrain.data.examples import ExampleBatch
from drivetrain.errors import ConfigError
from drivetrain.hardware.description import (
    Hardware,
    load_hardware,
    name_of_device,
    names_a_device,
)
from drivetrain.hardware.sizes import GIB, size_text
from drivetrain.memory import host_room
from drivetrain.model.first_batch import Candidate, batches_as_arguments, guessed_inputs
from drivetrain.model.fp8 import GATHERED
from drivetrain.planner.layout import layout_of, plain
from drivetrain.planner.options import AutoConfig, AutoOutline
from drivetrain.planner.search import (
    Prediction,
    Predictor,
    Task,
    fits,
    judged,
    more_hosts,
    permitted_methods,
    room_of,
)
from drivetrain.runtime.world import World
from drivetrain.simulator.step import FP8
from drivetrain.simulator.traced import traced_model
from drivetrain.strategy import Planning, Run, Strategy, StrategyPick

PROCESSOR = "cpu"
"""The kind of device, and the description, of processes that compute on processors."""

DESCRIBED = " (described, unmeasured)"
"""Words about hardware of which only a description is known, links included."""

HINT = (
    "; {} is a description that nobody measured on this machine: `drivetrain hardware measure` "
    "writes one, for strategy: {{name: auto, hardware: FILE}}"
)
"""Words after a prediction for such hardware."""


class Auto(AutoOutline, Strategy[AutoConfig]):
    """Chooses another strategy at ``prepare``; no object of it is ever made."""

    @classmethod
    def cost(cls, config: AutoConfig, model: ModelSpec, run: Run) -> Cost:
        """Return that nothing is known yet."""
        return Cost(uncounted={"dp": "everything of the strategy that prepare() chooses"})

    @classmethod
    def planning(cls) -> Planning:
        """Return the search for a plan."""
        return ChoosesPlan(cls)


class ChoosesPlan(Planning):
    """Chooses a data-parallel strategy by the predictions of plans."""

    def variants(self, world_size: int) -> Sequence[Mapping[str, Any]]:
        """Return no form: the strategies that may be chosen have theirs."""
        return ()

    def choose(
        self, config: AutoConfig, model: nn.Module, run: Run, recompute: Sequence[str]
    ) -> StrategyPick:
        """Return the quickest data-parallel layout that fits, by the prediction of rank 0.

        Raises:
            ConfigError: no description of the hardware is known, the model cannot be looked at, or
                nothing fits; on every rank.
        """
        examples = run.examples.read()
        answer = _Answer()
        if run.world.rank == 0:
            try:
                answer = _Answer(_chosen(config, model, run, recompute, examples))
            except Exception as error:  # the other ranks wait for an answer
                answer = _Answer(problem=str(error))
        if run.world.size > 1:
            answer = share_facts(answer, _Answer, doing="the choice of a strategy")
        if answer.pick is None:
            raise ConfigError(f"strategy auto: {answer.problem}; or name a strategy yourself")
        return answer.pick


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of rank 0: a choice, or why there is none."""

    pick: StrategyPick | None = None
    problem: str = ""


def _chosen(
    config: AutoConfig,
    model: nn.Module,
    run: Run,
    recompute: Sequence[str],
    examples: Sequence[ExampleBatch],
) -> StrategyPick:
    world = run.world
    hardware, described = hardware_of(config.hardware, world)
    paper = traced_model(model, candidates_of(model, examples))
    rows = run.examples.rows(run.mesh["dp"].size) or 1
    hosts, per_host = len(set(world.islands)), world.island_size
    hardware.check_measured(hosts, per_host)
    task = Task(paper, rows * run.accumulation * world.size, hardware, hosts, per_host)
    found = list(_predicted(Predictor(task), run, rows, recompute if paper.layers else ("none",)))
    if not found:
        raise ConfigError("no installed strategy draws the step of such a run")
    room = room_of(task)
    fitting = [each for each in found if fits(task, each)]
    if not fitting:
        least = min(found, key=Prediction.needed)
        raise ConfigError(
            f"no data-parallel layout fits: {least.layout} needs "
            f"{size_text(least.needed())} of {size_text(room)}; take "
            f"{more_hosts(task, run.precision.name)}, or divide the model over ranks: see "
            "`drivetrain plan`"
        )
    best = min(fitting, key=lambda each: (judged(each), each.needed()))
    planned = best.planned
    section = {"name": planned.strategy, **plain(planned.values)}
    settings = {} if planned.recompute == "none" else {"recompute": {"mode": planned.recompute}}
    line = (
        f"{best.layout} of {len(found)} layouts: {best.step_seconds * 1e3:,.2f} ms a step planned, "
        f"{size_text(best.needed())} of {size_text(room)}, on {described}"
    )
    hint = HINT.format(hardware.name) if described.endswith(DESCRIBED) else ""
    return StrategyPick(section, settings, line, best.step_seconds, hint)


def hardware_of(source: str, world: World) -> tuple[Hardware, str]:
    """Return the description of a run's devices, and words about its origin.

    Args:
        source: name or file of a description; "" finds one by the devices' name.
        world: of the run.

    Raises:
        ConfigError: no description is known.
    """
    if source:
        words = DESCRIBED if names_a_device(source) else ""
        return load_hardware(source), f"{source}{words}"
    if world.device.type == PROCESSOR:
        hardware = load_hardware(PROCESSOR)
        memory = hardware.device.memory
        share = host_room() / world.local_size / GIB
        device = hardware.device.model_copy(
            update={"memory": memory.model_copy(update={"gib": share})}
        )
        return hardware.model_copy(update={"device": device}), f"{PROCESSOR}{DESCRIBED}"
    title = torch.get_device_module(world.device).get_device_name(world.device)
    name = name_of_device(title)
    if name is None:
        raise ConfigError(
            f"no description of {title!r} is known; write one with `drivetrain hardware measure` "
            "and name it: strategy: {name: auto, hardware: FILE}"
        )
    return load_hardware(name), f"{name}{DESCRIBED}"


def candidates_of(model: nn.Module, examples: Sequence[ExampleBatch]) -> Iterator[Candidate]:
    """Yield the script's own batches, then inputs of the model's class and guesses."""
    yield from batches_as_arguments(model, examples, cuts=False)
    yield from guessed_inputs(model)


def _predicted(
    predictor: Predictor, run: Run, rows: int, recompute: Sequence[str]
) -> Iterator[Prediction]:
    """Yield the prediction of every data-parallel layout that this run can have.

    Gradients cross hosts as ``links.far`` says; with ``auto``, by each method within
    ``links.allow``. Which one, ``drivetrain.compression.automatic`` decides by measurements.
    """
    task = predictor.task
    chosen = run.links.name_for("gradients")
    open_still = [EXACT, *permitted_methods(run.links)]
    methods = open_still if chosen == AUTO else [chosen]
    if not run.world.spans_hosts:
        methods = [EXACT]
    gathered = run.precision.recipe == GATHERED  # the other recipes send what bf16 sends
    for name, plan in predictor.installed.planned.items():
        for keys in plan.layouts(task.model.layers, task.model.heads, task.ranks, task.per_host):
            for mode, links in product(recompute, methods):
                own = {
                    "micro_batch": rows,
                    "recompute": mode,
                    "precision": FP8 if gathered else run.precision.compute or "no",
                }
                words = {**keys, **own, "data_parallel": name, "links": links}
                try:
                    texts = {key: str(value) for key, value in words.items()}
                    planned = layout_of(texts, predictor.installed)
                    planned.kind.check_options(planned.config, run.precision)
                    prediction = predictor.predict(planned)
                    if not prediction.stored_most("disk"):  # which directory, only users know
                        yield prediction
                except ConfigError:
                    continue  # this form is not for such a run
