"""A model's whole weights, however a strategy divides them: in place, as a state dict, as files."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import communication
from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import RankMismatchError, UsageError
from drivetrain.facade.prepared import PreparedModel, RunState
from drivetrain.model.guard import is_guarded
from drivetrain.model.modules import named_parameters, uncompiled
from drivetrain.parallel.backward import sum_of_words
from drivetrain.parallel.replicated import batched
from drivetrain.parallel.whole_state import copied_state
from drivetrain.saved_state import ReplicatedState, TrainingState


@dataclass(eq=False)
class WholeWeights:
    """The whole weights of one Accelerator's prepared models.

    Attributes:
        state: of the run, with the models.
    """

    state: RunState
    _compared: int = 0

    @contextmanager
    def gathered(
        self,
        owner: nn.Module | Tensor | Iterable[Tensor],
        parameters: Sequence[nn.Parameter] | None,
    ) -> Iterator[None]:
        """Context in which parameters are whole, and may be changed. Collective."""
        if isinstance(owner, nn.Module):
            entry = self.state.model(owner)
            chosen = list(owner.parameters()) if parameters is None else list(parameters)
            with entry.strategy.state.gathered(chosen), self.state.run.traffic.loads_for_all():
                yield
            return
        given = [owner] if isinstance(owner, Tensor) else list(owner)
        known = {key for entry in self.state.models for key in entry.names}
        if any(id(parameter) not in known for parameter in given):
            raise UsageError(
                "expected parameters of prepared models, found another tensor; take them from "
                "the model that prepare() returned"
            )
        with ExitStack() as stack:
            for entry in self.state.models:
                own = [p for p in given if id(p) in entry.names and isinstance(p, nn.Parameter)]
                if own:
                    stack.enter_context(entry.strategy.state.gathered(own))
            stack.enter_context(self.state.run.traffic.loads_for_all())
            yield

    @contextmanager
    def inference(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context in which the user's own module evaluates without gradients. Collective."""
        entry = self.state.model(model)
        inner = entry.model
        training = [module for module in inner.modules() if module.training]
        axes = entry.strategy.run.mesh.items()
        whole: AbstractContextManager[None] = nullcontext()  # ranks that compute parts go on so
        if all(axis.size == 1 for name, axis in axes if name != "dp"):
            whole = entry.strategy.state.gathered(list(inner.parameters()), modify=False)
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
        facts = {one.name: one for one in owner.facts(module)}
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
                with owner.whole(module, wanted) as state:
                    for name in wanted:
                        yield name, state[name]

        export.write_export(Path(save_directory), plan, fetch, world=self.state.world)

    def compare_when_due(self) -> None:
        """Compare the ranks' parameters after so many steps as the run asks for. Collective.

        They are compared bit by bit, by sums of their words.

        Raises:
            RankMismatchError: on every rank: names step, ranks and the first parameter.
        """
        every, steps = self.state.config.run.check_replicas_every, self.state.steps
        if not every or self.state.world.size == 1:
            return
        due, self._compared = steps // every != self._compared // every, steps
        for entry in self.state.models if due else ():
            module = uncompiled(entry.model)
            facts = {one.identity: one for one in entry.strategy.state.facts(module)}
            names, sums = [], []
            for batch in batched(one for one in facts.values() if one.trainable):
                wanted = [one.name for one in batch]
                with entry.strategy.state.whole(module, wanted) as state:
                    sums += [sum_of_words(state[name]).cpu() for name in wanted]
                names += wanted
            if sums:
                everyone = communication.gather(torch.stack(sums).unsqueeze(0)).tolist()
                _check_equal(names, everyone, steps)

    def compare_first(self, entry: PreparedModel) -> None:
        """Compare what ranks hold alike, before the first gradients of a model cross. Collective.

        Since ``prepare`` made them equal, forwards may have written into parameters, or the script.

        Raises:
            RankMismatchError: on every rank: names the first parameter that differs.
        """
        if self.state.world.size == 1 or entry.strategy.pace.apart:
            return
        entry.compared = True
        line = entry.strategy.run.mesh["dp"].ranks
        mine = {
            name: int(sum_of_words(parameter))
            for name, parameter in named_parameters(entry.model).items()
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

    def _readable(self, model: nn.Module) -> tuple[nn.Module, TrainingState]:
        """Return the user's uncompiled module, and who reads whole tensors of it.

        Every rank has all of a model that was not prepared, an average of weights for example.

        Raises:
            UsageError: the model has parameters of a prepared one, which may be divided.
        """
        known = {key for entry in self.state.models for key in entry.names}
        if self.state.has(model) or any(id(one) in known for one in model.parameters()):
            entry = self.state.model(model)
            return uncompiled(entry.model), entry.strategy.state
        return uncompiled(model), ReplicatedState(model)


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
