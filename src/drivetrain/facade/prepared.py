"""The objects that one Accelerator has prepared, and the whole weights of models.

A model's whole weights, however a strategy divides them: in place, as a state dict, as files.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from drivetrain import communication
from drivetrain.checkpoint.commit import gather
from drivetrain.checkpoint.loading import ModelReader
from drivetrain.collectives.facts import gather_facts
from drivetrain.config.policy import dtype_word
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.data import PreparedLoader
from drivetrain.errors import CheckpointError, ConfigError, RankMismatchError, UsageError
from drivetrain.facade.settings import Runs
from drivetrain.facade.stepping import PreparedOptimizer, PreparedScheduler
from drivetrain.losses import restore_loss
from drivetrain.model.fp8 import restore_products
from drivetrain.model.guard import is_guarded
from drivetrain.model.modules import (
    UninheritedContext,
    UninheritedMethod,
    all_names,
    clean_name,
    named_parameters,
    restore_forward,
    uncompiled,
)
from drivetrain.parallel.backward import UserHooks
from drivetrain.parallel.whole_state import (
    KERNELS,
    GivenGroups,
    Holder,
    WholeOptimizer,
    batched,
    copied_state,
    refuse_parts,
    saving_methods,
)
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import Readable
from drivetrain.strategy import Strategy

# --- the objects that one Accelerator has prepared ---


@dataclass(slots=True, eq=False)
class PreparedModel:
    """One prepared model, its strategy, and the loss scale of its gradients.

    Attributes:
        model: the module that the script holds.
        strategy: the strategy object of this model alone.
        optimizers: the strategy's optimizers, unwrapped, in the order given.
        names: parameter name by identity, as the user's model has it.
        given: the facts of the model as the script made it, without the module.
        scale: loss scale of the gradients at hand; None before the first backward.
        unscaled: whether the gradients at hand were divided by their scale, and carry 1.0.
        made_with: the loss scale that divided them.
        overflow: whether the gradients at hand are infinite somewhere.
        notes: handles of the hooks that note which model runs, and how its forward ends.
        used: whether a step has used the gradients at hand.
        norm_dtype: of the norm of its gradients, as torch has it, whatever a strategy sums in.
        methods: those that the model has in place of its class's, while it is prepared.
        compared: whether the ranks' values were compared before their first gradients.
        parameters: those of the module, tied ones once.
        known: their identities.
        hooks: those that the script has put on parameters.
        mixing: its layers whose results for a row depend on other rows, by name.
    """

    model: nn.Module
    strategy: Strategy[Any]
    optimizers: tuple[Optimizer, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    given: ModelSpec = ModelSpec(())
    scale: float | None = None
    unscaled: bool = False
    made_with: float = 1.0
    overflow: bool = False
    notes: tuple[RemovableHandle, ...] = ()
    used: bool = False
    norm_dtype: torch.dtype = torch.float32
    methods: list[UninheritedMethod] = field(default_factory=list)
    compared: bool = False
    parameters: tuple[nn.Parameter, ...] = field(init=False)
    known: frozenset[int] = field(init=False)
    hooks: UserHooks = field(init=False)
    mixing: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        """Remember which parameters the model has now."""
        # Also those that other ranks hold, whose gradients are none of this rank's.
        self.parameters = tuple(each for _, each in self.module.named_parameters())
        self.known = frozenset(map(id, self.parameters))
        self.hooks = UserHooks(self.parameters)
        modules = self.module.named_modules()
        self.mixing = {name: each for name, each in modules if isinstance(each, _BatchNorm)}

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.strategy.unwrap(self.model)

    @property
    def states(self) -> int:
        """How many tensors the optimizers keep for most of their parameters; 0 before a step."""
        counts = Counter(
            sum(isinstance(value, Tensor) and value.dim() > 0 for value in state.values())
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            if isinstance(state, Mapping)
        )
        return counts.most_common(1)[0][0] if counts else 0

    def promised(self, states: int) -> Cost:
        """Return what the strategy promises to hold and send, with so many states.

        Raises:
            DrivetrainError: sizes alone are not enough for the strategy.
        """
        given = replace(self.given, states=states)
        return type(self.strategy).cost(self.strategy.config, given, self.strategy.run)

    def check_parameters(self) -> None:
        """Refuse parameters that came after ``prepare``: nobody would average their gradients."""
        # Every step comes here: by identity, since the known ones may be slow to ask anything.
        modules, known, seen = [self.module], self.known, set()
        while modules:
            module = modules.pop()
            if module in seen:
                continue
            seen.add(module)
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in known and parameter.requires_grad:
                    self._refuse_parameter(parameter)
            modules += [each for each in module._modules.values() if each is not None]

    def _refuse_parameter(self, found: nn.Parameter) -> NoReturn:
        name = next(name for name, each in self.module.named_parameters() if each is found)
        raise UsageError(
            f"expected the parameters that the model had in prepare(), found another one, "
            f"{name!r}; change the model before prepare(), write new values into the old parameter "
            "inside 'with accelerator.gathered(model):', or set requires_grad=False on what is not "
            "trained"
        )

    def check_dtypes(self, given: Sequence[TensorSpec], precision: Precision) -> None:
        """Compare the dtypes of the strategy's parameters and masters with the policy.

        ``given`` are the model's parameters before ``prepare``.

        Raises:
            ConfigError: names the first parameter that forward reads, or an optimizer updates, in
                another dtype.
        """
        specs = {clean_name(spec.name): spec for spec in given}
        for name, parameter in named_parameters(self.module).items():
            if name in specs:
                expected = precision.forward_dtype(specs[name].dtype, specs[name].shape)
                self._check_dtype("param", name, expected, parameter.dtype)
        names = self.held_names()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for parameter in group["params"]:
                spec = specs.get(names.get(id(parameter), ""))
                if spec is not None:
                    expected = precision.master_dtype(spec.dtype, spec.shape)
                    self._check_dtype("master", spec.name, expected, parameter.dtype)

    def _check_dtype(self, key: str, name: str, expected: torch.dtype, found: torch.dtype) -> None:
        if found is not expected:
            raise ConfigError(
                f"{type(self.strategy).__name__}: expected {dtype_word(expected)} for {name}, as "
                f"dtypes.{key} says, found {dtype_word(found)}; the strategy does not honour it: "
                f"take another strategy, or leave dtypes.{key} out"
            )

    def held_names(self) -> dict[int, str]:
        """Return parameter names by identity, those of the optimizers' fragments included."""
        return {**self.names, **self.strategy.held_tensors.names()}

    def forget_gradients(self) -> None:
        """Drop the gradients at hand, with their loss scale."""
        self.used = True  # or a window that no step has used would be spared
        self.module.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scale, self.unscaled, self.overflow = None, False, False

    def scalars(self) -> dict[int, dict[str, dict[str, Any]]]:
        """Return the optimizers' state that is no tensor, by optimizer and parameter name."""
        result: dict[int, dict[str, dict[str, Any]]] = {}
        names = self.held_names()
        for i, optimizer in enumerate(self.optimizers):
            result[i] = {
                names[id(parameter)]: plain
                for parameter, state in optimizer.state.items()
                if id(parameter) in names
                and (plain := {k: v for k, v in state.items() if not isinstance(v, Tensor)})
            }
        return result

    def param_groups(self) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of each group of each optimizer."""
        return [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def check_param_groups(self, saved: list[list[dict[str, Any]]]) -> None:
        """Refuse hyperparameters of other optimizers, or of another number of groups."""
        check_count("optimizers of a model", len(self.optimizers), len(saved))
        for optimizer, groups in zip(self.optimizers, saved, strict=True):
            check_count("parameter groups", len(optimizer.param_groups), len(groups))

    def load_param_groups(self, saved: list[list[dict[str, Any]]]) -> None:
        """Put hyperparameters of ``param_groups`` back into the groups of the optimizers."""
        self.check_param_groups(saved)
        for optimizer, groups in zip(self.optimizers, saved, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for key, value in values.items():
                    if key in KERNELS:
                        continue
                    if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value

    def aliases(self) -> dict[str, str]:
        """Return the further names of tied parameters and buffers -> the first name of each."""
        names = all_names(self.module)
        return {name: first for first, each in names.items() for name in each if name != first}

    def converted(self, reader: ModelReader, world: World) -> str:
        """Return which weights a load had to convert, "" when none. Collective.

        The saved dtypes are compared with the dtypes of the strategy's shards, or of their masters.
        """
        if reader.partial:
            return ""
        mine: dict[str, str] = {}
        for shard in self.strategy.shards():
            if not shard.state and shard.tensor.dtype != reader.dtype(shard.name):
                saved = reader.dtype(shard.name)
                mine[shard.name] = f"from {saved} to {shard.tensor.dtype}"
        told = gather(world, mine, dict[str, str])
        kinds = Counter({name: kind for each in told for name, kind in each.items()}.values())
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))

    def offer_methods(self, window: GradientState) -> None:
        """Give the model methods: ``no_sync`` of torch's wrapper, and some of its own anew."""
        if not hasattr(self.model, "no_sync"):
            self.model.__dict__["no_sync"] = UninheritedContext(self.strategy.accumulating)
        given = self.model.zero_grad

        def clear(set_to_none: bool) -> None:
            self.used = False
            given(set_to_none)

        def zero_grad(set_to_none: bool = True) -> None:
            window.clear(partial(clear, set_to_none), used=self.used)

        self.methods.append(UninheritedMethod(self.model, "zero_grad", zero_grad))
        self.methods += saving_methods(uncompiled(self.module), self.strategy)
        for method in self.methods:
            method.put()

    def close(self) -> None:
        """Make the model an ordinary one again."""
        restore_forward(self.model)
        self.model.__dict__.pop("no_sync", None)
        for method in self.methods:
            method.take_off()
        for note in self.notes:
            note.remove()
        self.strategy.close()
        restore_loss(self.module)
        restore_products(self.module)


@dataclass(slots=True, eq=False)
class PreparedObjects:
    """Everything that one Accelerator has prepared, each kind in the order of ``prepare``.

    Attributes:
        models: the models.
        optimizers: the optimizers as the script holds them.
        schedulers: the learning-rate schedulers as the script holds them.
        loaders: the loaders as the script holds them.
        bound: pairs of an optimizer as given and the strategy's optimizer made of it.
        groups: those of each optimizer as the script made them.
        trains: the loader that was prepared in one call with an optimizer, if any.
        last_run: the model whose forward ran last with gradients; None before the first.
        last_call: arguments of that forward, by position and by name, after a backward without
            values; None after a step.
    """

    models: list[PreparedModel] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    bound: list[tuple[Optimizer, Optimizer]] = field(default_factory=list)
    groups: dict[Optimizer, GivenGroups] = field(default_factory=dict)
    trains: PreparedLoader | None = None
    last_run: PreparedModel | None = None
    last_call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None

    def let_go_of_batch(self) -> None:
        """Keep the shapes of the last call's arguments alone: the step may need their memory."""
        self.last_call = tree_map_only(Tensor, _without_values, self.last_call)

    def samples_per_step(self, accumulation: int) -> int:
        """Return the samples of a step over all ranks; 0 where batches have no one size."""
        try:
            return self.trains.total_batch_size * accumulation if self.trains is not None else 0
        except UsageError:
            return 0

    def has(self, model: nn.Module) -> bool:
        """Whether a model was prepared here."""
        return any(entry.model is model or entry.module is model for entry in self.models)

    def unwrapped(self, model: nn.Module, keep_forward: bool) -> nn.Module:
        """Return the user's module of a prepared model; with the forward as it was, if asked."""
        for entry in self.models:
            if entry.model is model:
                model = entry.module
        if not keep_forward:
            restore_forward(model)
        return model

    def model(self, model: nn.Module) -> PreparedModel:
        """Return the entry of a model, as ``prepare`` returned it or as the script made it.

        Raises:
            UsageError: the model was not prepared here.
        """
        for entry in self.models:
            if entry.model is model or entry.module is model:
                return entry
        raise UsageError(
            f"expected a model that this Accelerator prepared, found {type(model).__name__}; "
            "pass it to prepare() first and use what it returns"
        )

    def chosen(self, models: Sequence[nn.Module]) -> list[PreparedModel]:
        """Return the entries of models, or of modules inside them; of all models without any."""
        return [self._around(model) for model in models] if models else list(self.models)

    def _around(self, module: nn.Module) -> PreparedModel:
        """Return the entry of a model, or of the model that a module is part of."""
        inside = [
            entry for entry in self.models if any(m is module for m in entry.module.modules())
        ]
        return inside[0] if inside else self.model(module)

    def trained_by(self, optimizer: Optimizer) -> list[PreparedModel]:
        """Return the models of an optimizer that a strategy handed back."""
        return [entry for entry in self.models if any(o is optimizer for o in entry.optimizers)]

    def whole(self, optimizer: Optimizer) -> WholeOptimizer | None:
        """Return the whole of an optimizer that a strategy divides; None: each rank has all."""
        entries = self.trained_by(optimizer)
        if not any(entry.strategy.held_tensors.divided for entry in entries):
            return None
        holders = [
            Holder(each.strategy, each.optimizers.index(optimizer), each.names, each.known)
            for each in entries
        ]
        return WholeOptimizer(optimizer, self.groups[optimizer], holders)

    def note_groups(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember the groups of optimizers before a strategy may divide them."""
        for optimizer in optimizers:
            if optimizer not in self.groups:
                self.groups[optimizer] = GivenGroups(optimizer)
                refuse_parts(optimizer, self.whole)

    def owners_of(self, parameters: Sequence[Tensor]) -> list[PreparedModel]:
        """Return the models of these parameters, or of what optimizers hold in their place.

        All models, where other ranks may have parameters of other models among theirs: in groups of
        optimizers, and of a part of a model, a rank may have none.

        Raises:
            UsageError: a parameter belongs to no prepared model.
        """
        wanted = {id(parameter) for parameter in parameters}
        owners = [entry for entry in self.models if wanted & entry.names.keys()]
        others = wanted.difference(*(entry.names.keys() for entry in owners))
        foreign = others and others.difference(
            *(entry.strategy.held_tensors.names() for entry in self.models)
        )
        if foreign:
            raise UsageError(
                f"expected parameters of prepared models, found {len(foreign)} of {len(wanted)} "
                "that belong to none; pass model.parameters() of what prepare() returned"
            )
        parts = any(
            entry.strategy.planning().stages(entry.strategy.config) for entry in self.models
        )
        return list(self.models) if others or parts or not wanted else owners

    def running(self) -> PreparedModel:
        """Return the model whose forward ran last: backward is a matter of its strategy.

        Raises:
            UsageError: no model was prepared.
        """
        if not self.models:
            raise UsageError(
                "expected a prepared model before backward(), found none; call "
                "model = accelerator.prepare(model)"
            )
        return self.last_run or self.models[-1]

    @contextmanager
    def in_backward(self, *, ranks: int, counts: bool, averages: bool) -> Iterator[None]:
        """Context of a backward, in which hooks of the script wait for averaged gradients.

        Args:
            ranks: how many there are: in one process hooks run as ever.
            counts: False leaves all gradients what they are: the loss has the weight 0.
            averages: whether the backward ends with averaged gradients.
        """
        with ExitStack() as stack:
            for entry in self.models:
                if ranks > 1 and (hooked := entry.hooks.found()):
                    stack.enter_context(entry.hooks.aside(hooked, averages=averages))
                if not counts:
                    stack.enter_context(_uncounted(entry))
            yield

    def forget(self) -> None:
        """Make all models ordinary ones again, and let go of everything."""
        for entry in self.models:
            entry.close()
        for kept in (self.models, self.optimizers, self.schedulers, self.loaders, self.bound):
            kept.clear()
        self.groups.clear()
        self.last_run = self.last_call = None
        self.trains = None


@contextmanager
def _uncounted(entry: PreparedModel) -> Iterator[None]:
    """Context around the backward of a micro-batch that counts nothing: it adds zeros.

    Its loss, and whatever its graph computes, may be no numbers.
    """
    pipeline = entry.strategy.pipeline
    trained = [p for p in named_parameters(entry.module).values() if p.requires_grad]
    with ExitStack() as stack:
        if pipeline is None:
            for each in trained:
                hook = each.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        else:
            pipeline.counts = False
            stack.callback(setattr, pipeline, "counts", True)
        yield


def _without_values(tensor: Tensor) -> Tensor | None:
    plain = type(tensor) is Tensor and not tensor.is_nested and tensor.layout is torch.strided
    return tensor.new_empty(tensor.shape, device="meta") if plain else None


def check_count(subject: str, expected: int, found: int) -> None:
    """Refuse a checkpoint that holds another number of something."""
    if expected != found:
        raise CheckpointError(
            f"expected a checkpoint with {expected} {subject}, found {found}; prepare and register "
            "the same objects in the same order as the run that saved it"
        )


# --- a model's whole weights, however a strategy divides them ---

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


class WholeWeights:
    """The whole weights of one Accelerator's prepared models.

    Args:
        prepared: the models.
        runs: all ranks, and after how many steps their replicas are compared.
    """

    def __init__(self, prepared: PreparedObjects, runs: Runs) -> None:
        self._prepared = prepared
        self._world = runs.default.world
        self._every = runs.config.run.check_replicas_every
        self._compared = 0

    @contextmanager
    def gathered(
        self,
        owner: nn.Module | Tensor | Iterable[Tensor],
        parameters: Sequence[nn.Parameter] | None,
    ) -> Iterator[None]:
        """Context in which parameters are whole, and may be changed. Collective."""
        if isinstance(owner, nn.Module):
            entry = self._prepared.model(owner)
            chosen = list(owner.parameters()) if parameters is None else list(parameters)
            with entry.strategy.gathered(chosen):
                yield
            return
        given = [owner] if isinstance(owner, Tensor) else list(owner)
        known = {key for entry in self._prepared.models for key in entry.names}
        if any(id(parameter) not in known for parameter in given):
            raise UsageError(
                "expected parameters of prepared models, found another tensor; take them from "
                "the model that prepare() returned"
            )
        with ExitStack() as stack:
            for entry in self._prepared.models:
                own = [p for p in given if id(p) in entry.names and isinstance(p, nn.Parameter)]
                if own:
                    stack.enter_context(entry.strategy.gathered(own))
            yield

    @contextmanager
    def inference(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context in which the user's own module evaluates without gradients. Collective."""
        entry = self._prepared.model(model)
        inner = entry.module
        training = [module for module in inner.modules() if module.training]
        axes = entry.strategy.run.mesh.items()
        whole: AbstractContextManager[None] = nullcontext()  # ranks that compute parts go on so
        if all(axis.size == 1 for name, axis in axes if name != "dp"):
            whole = entry.strategy.gathered(list(inner.parameters()), modify=False)
        with whole, torch.no_grad():
            inner.eval()
            try:
                yield inner
            finally:
                for module in training:
                    module.training = True

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state on every rank's CPU, by the user's names. Collective."""
        return copied_state(*self._readable(model))

    def save(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str,
        safe_serialization: bool,
        only_trainable: bool,
    ) -> None:
        """Write a model's weights in Hugging Face's layout; see ``save_model``. Collective."""
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; no pickles are written"
            )
        module, owner = self._readable(model)
        facts = {one.name: one for one in owner.state_facts(module)}
        if only_trainable:
            facts = {name: one for name, one in facts.items() if one.trainable}
            if not facts:
                raise UsageError(
                    f"expected trainable parameters in {type(module).__name__} for "
                    "only_trainable=True, found none; export all of it without"
                )
        from drivetrain.checkpoint import export  # loaded by who exports

        plan = export.plan_export(facts.values(), max_shard_size)

        def fetch(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for batch in batched(facts[name] for name in names):
                wanted = [one.name for one in batch]
                with owner.whole_state(module, wanted) as state:
                    for name in wanted:
                        yield name, state[name]

        export.write_export(Path(save_directory), plan, fetch, world=self._world)

    def compare_when_due(self) -> None:
        """Compare the ranks' parameters after so many steps as the run asks for. Collective."""
        if not self._every or self._world.size == 1:
            return
        steps = max((optimizer.steps for optimizer in self._prepared.optimizers), default=0)
        if steps // self._every != self._compared // self._every:
            self.compare_replicas(steps)
        self._compared = steps

    def compare_replicas(self, step: int) -> None:
        """Compare the ranks' parameters bit by bit, by sums of their words. Collective.

        Raises:
            RankMismatchError: on every rank: names step, ranks and the first parameter.
        """
        for entry in self._prepared.models:
            module = uncompiled(entry.module)
            facts = {one.identity: one for one in entry.strategy.state_facts(module)}
            names, sums = [], []
            for batch in batched(one for one in facts.values() if one.trainable):
                wanted = [one.name for one in batch]
                with entry.strategy.whole_state(module, wanted) as state:
                    sums += [_sum_of_words(state[name]) for name in wanted]
                names += wanted
            if sums:
                everyone = communication.gather(torch.stack(sums).unsqueeze(0)).tolist()
                _check_equal(names, everyone, step)

    def compare_first(self) -> None:
        """Compare what ranks hold alike, before the first gradients of a model cross. Collective.

        Since ``prepare`` made them equal, forwards may have written into parameters, or the script.

        Raises:
            RankMismatchError: on every rank: names the first parameter that differs.
        """
        if self._world.size == 1:
            return
        for entry in self._prepared.models:
            if not entry.compared and not entry.strategy.pace.apart:
                entry.compared = True
                self._check_alike(entry)

    def _check_alike(self, entry: PreparedModel) -> None:
        line = entry.strategy.run.mesh["dp"].ranks
        mine = {
            name: int(_sum_of_words(parameter))
            for name, parameter in named_parameters(entry.module).items()
            if not is_guarded(parameter) and parameter.layout is torch.strided  # here, and whole
        }
        doing = "the comparison of parameters before the first gradients"
        facts = [line[0], int(hashlib.sha256(repr(mine).encode()).hexdigest()[:12], 16)]
        sums = {tuple(each) for each in gather_facts(facts, list[int], doing=doing)}
        if len(sums) == len({first for first, _ in sums}):
            return
        lines: dict[int, dict[str, int]] = {}
        everyone = gather_facts((line[0], mine), tuple[int, dict[str, int]], doing=doing)
        for rank, (first, theirs) in enumerate(everyone):
            known = lines.setdefault(first, theirs)
            for name in (name for name in known if known[name] != theirs.get(name)):
                raise RankMismatchError(
                    f"expected equal parameters on all ranks before the first gradients, found "
                    f"other values of {name!r} on ranks {first} and {rank}: a forward, or the "
                    "script, has written what is of one rank alone, such as means of its batch. "
                    "Write the same on all ranks, the accelerator.reduce() of it for example, or "
                    "let a buffer hold it, which follows that of rank 0"
                )

    def _readable(self, model: nn.Module) -> tuple[nn.Module, Readable]:
        """Return the user's uncompiled module, and who reads whole tensors of it.

        Every rank has all of a model that was not prepared, an average of weights for example.

        Raises:
            UsageError: the model has parameters of a prepared one, which may be divided.
        """
        known = {key for entry in self._prepared.models for key in entry.names}
        if self._prepared.has(model) or any(id(one) in known for one in model.parameters()):
            entry = self._prepared.model(model)
            return uncompiled(entry.module), entry.strategy
        return uncompiled(model), Readable()


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers of its element's size, on the CPU."""
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    words = values.contiguous().view(_WORDS[values.element_size()])
    return words.sum(dtype=torch.int64).cpu()


def _check_equal(names: Sequence[str], everyone: Sequence[Sequence[int]], step: int) -> None:
    """Refuse sums of parameters that differ between ranks."""
    for index, name in enumerate(names):
        sums = [each[index] for each in everyone]
        usual, count = Counter(sums).most_common(1)[0]
        odd = [str(rank) for rank, each in enumerate(sums) if each != usual]
        if not odd:
            continue
        majority = count > len(sums) / 2
        who = f"rank {', '.join(odd)} alone" if majority else "no majority of ranks alike"
        raise RankMismatchError(
            f"expected equal replicas on all ranks after step {step}, found other values of "
            f"{name!r}: {who}; ranks updated them differently (an optimizer of another kind, code "
            "that depends on the rank), or memory of a rank is faulty: load a checkpoint"
        )
