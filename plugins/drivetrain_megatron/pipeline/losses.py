"""The loss of a batch in a pipeline: its weights, the calls that it comes from, and its value.

The loss is promised, and made while backward runs, or made of the output of the whole batch.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from drivetrain.errors import UsageError
from drivetrain.losses import linear_cross_entropy
from drivetrain.model.guard import Arguments, Keywords
from drivetrain.model.valueless import ValuesNeededError
from drivetrain_megatron.pipeline.runner import LocalStages, LossOf, StageWorker, find_loss
from drivetrain_megatron.pipeline.schedules import ActionKind, make_schedule
from drivetrain_megatron.pipeline.transfer import Dims, DividedCall, Division, MicroBatch, join
from drivetrain_megatron.recording.proxy import (
    CALL,
    OTHER,
    OWN_BACKWARD,
    StageProxy,
    metadata,
    origins_in,
    resolve,
    same_value,
    slope_of,
    with_values,
)

# --- the weight of each micro-batch's loss, known before the loss is computed ---


class Weights(IntEnum):
    """The kind of these weights; of several ranks' answers the highest counts."""

    ROWS = 0
    """Rows over those of the batch: the loss is a mean over rows."""
    ONES = 1
    """One each: the loss is a sum, perhaps over a number of the whole batch."""
    TARGETS = 2
    """Counted targets over those of the batch, where negative targets may be ignored."""
    COUNTED = 3
    """The same, where any target may be ignored or weigh differently."""
    NONE = 4
    """None are right: the loss is made of the whole batch."""


def shares_of(
    weights: Weights,
    batches: Sequence[MicroBatch],
    loss_without_blocks: Callable[[MicroBatch], Any],
) -> list[float]:
    """Return factors of the micro-batches' losses whose sum is the loss of the batch.

    Targets that do not count are found by making the loss of each micro-batch on proxies.

    Raises:
        UsageError: the loss is no longer the mean of one cross entropy.
    """
    if len(batches) == 1 or weights is Weights.ONES:
        return [1.0] * len(batches)
    counts = [float(batch.rows) for batch in batches]
    if weights in (Weights.TARGETS, Weights.COUNTED):
        counted = [_counted(batch, loss_without_blocks) for batch in batches]
        counts = counted if sum(counted) else counts
    return [count / sum(counts) for count in counts]


def has_negative(batch: MicroBatch) -> bool:
    """Whether some integer of a batch is negative: losses ignore such targets."""
    integers = [
        x for x in batch.flat()[0] if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel()
    ]
    return any(bool((x < 0).any()) for x in integers)


def _counted(batch: MicroBatch, loss_without_blocks: Callable[[MicroBatch], Any]) -> float:
    """Return over how many targets the loss is a mean."""
    counter = TargetCounter()
    with counter, torch.no_grad():
        loss_without_blocks(batch)
    if len(counter.counts) != 1:
        raise UsageError(
            f"expected a loss that is the mean of one cross entropy, as in the first call with "
            f"these inputs, found {len(counter.counts)} of them; make it in the same way in every "
            "call, or set micro_batches: 1"
        )
    return counter.counts[0]


class TargetCounter(TorchFunctionMode):
    """Counts the targets of cross entropies.

    Attributes:
        counts: over how many targets, or weights of targets, each is a mean.
        lengths: how many targets each has, counted or not.
        varies: whether other targets than negative ones may be ignored or weigh differently.
    """

    def __init__(self, *, ignores_zeros: bool = False) -> None:
        super().__init__()
        self._ignores_zeros = ignores_zeros
        self.counts: list[float] = []
        self.lengths: list[int] = []
        self.varies = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        """Call a function of torch; note the targets of a loss."""
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss, linear_cross_entropy):
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            self._note(given.arguments)
            return func(*given.args, **given.kwargs)
        return func(*args, **kwargs)

    def _note(self, given: dict[str, Any]) -> None:
        target, weight, ignored = given["target"], given["weight"], given["ignore_index"]
        if target.is_floating_point() or isinstance(target, StageProxy):
            return
        if self._ignores_zeros:
            target = given["target"] = target.masked_fill(target == 0, ignored)
        if given["reduction"] != "mean":
            return
        kept = target[target != ignored]
        self.counts.append(float(kept.numel() if weight is None else weight[kept].sum()))
        self.lengths.append(target.numel())
        self.varies |= weight is not None or ignored >= 0


# --- of which calls a loss was made, and its value, made in backward ---

# A script may make one loss of several calls of the model, and may run backwards in any order, so
# whatever comes out of a call knows the call (``LossOrigin``).
#
# L2: the model returns its loss. L3: the script hands a loss function over. Either way the loss of
# a batch is promised (``PromisedLoss``), and made while its backward runs, in any schedule, as the
# weighted sum of the micro-batches' losses (``shares``).


_ELSEWHERE = "a tensor of an earlier stage"
"""Stands among the origins of a proxy for a part of the output that the last stage lacks."""


_BESIDE = "a tensor beside the model's loss"
"""Stands among the origins of a proxy for what comes with a loss that is promised."""


_WRONG = (
    (
        "expected a loss made of tensors of the last pipeline stage, found one that takes the "
        "output of an earlier block, too (deep supervision, hidden states): its gradient "
        "would begin on another stage. Let the blocks pass this tensor on with their output, "
        "or use no pipeline (pp: 1)"
    ),
    (
        "expected the loss that the model returned, or a multiple of it, found a loss made of "
        "a tensor that it returned beside (logits, hidden states): with micro-batches the "
        "forward runs inside of accelerator.backward(loss). Let the model return no loss in "
        "such calls (models of Hugging Face: leave labels out) and make all of it outside, "
        "make it in a function for accelerator.pipeline_step(), or set micro_batches: 1"
    ),
    (
        "expected a loss made of a tensor that the model returned, found none in it: call the "
        "model with gradients enabled, make the loss of its output, and let it return tensors "
        "in a tuple, list, dict or Hugging Face ModelOutput (a dataclass has to be registered "
        "by torch.export.register_dataclass)"
    ),
    (
        "expected a loss made of nothing but what the model returned, found something else in "
        "it that wants a gradient, such as a penalty on parameters: it would count on the last "
        "pipeline stage alone. Use the optimizer's weight_decay for a penalty, or add its "
        "gradient to each parameter.grad after backward()"
    ),
)
"""What may be wrong with a loss: the order in which it is looked for."""


class LossOrigin:
    """One call of the model, known by its identity."""

    def __init__(self, *, is_running: bool = False) -> None:
        self.is_running = is_running

    def mark(self, output: Any) -> None:
        """Let tensors, in any structure, know that they came out of this call.

        None is a leaf of autograd's graph, whose node nobody may keep.
        """
        for leaf in tree_leaves(output):
            if isinstance(leaf, StageProxy):
                leaf.origins = frozenset({self}) if leaf.requires_grad else frozenset()
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                metadata(get_gradient_edge(leaf).node)[CALL] = self
                leaf.register_hook(self._check_running)  # type: ignore[no-untyped-call]

    def _check_running(self, gradient: Tensor) -> None:
        if not self.is_running:
            raise UsageError(OWN_BACKWARD)


def handed_out(output: Any, *, leaves: bool = False) -> Any:
    """Return an output with views: an earlier stage's own backward passes the tensors themselves.

    A script's backward passes the views, and is refused there. With ``leaves`` there are views of
    the leaves of autograd's graph alone, among which may be parameters.
    """

    def view(leaf: Any) -> Any:
        has_graph = isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf >= leaves
        return leaf.view_as(leaf) if has_graph and not isinstance(leaf, StageProxy) else leaf

    return tree_map(view, output)


def mark_elsewhere(output: Any, blocks: range) -> None:
    """Let parts of an output know that they are on other stages than the last, on every rank.

    Args:
        output: of the model, in any structure.
        blocks: those whose tensors the last stage has.
    """
    for leaf in _wanting(output):
        if not leaf.blocks <= {*blocks}:
            leaf.origins = frozenset({_ELSEWHERE})


def mark_beside(output: Any) -> None:
    """Let the proxies of an output know that they stand beside a loss that is promised."""
    for leaf in _wanting(output):
        leaf.origins = frozenset({_BESIDE})


def _wanting(output: Any) -> list[StageProxy]:
    """Return the proxies of an output that want a gradient."""
    return [x for x in tree_leaves(output) if isinstance(x, StageProxy) and x.requires_grad]


def behind_inputs(output: Any, batch: MicroBatch) -> Any:
    """Return an output with a graph that reaches the inputs which want a gradient.

    The graph of the last stage ends where the stage before sends. A script that asks for gradients
    of the inputs is then told why there are none, instead of that the inputs were not used.
    """
    leaves = tree_leaves((batch.args, batch.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def joined(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and not isinstance(leaf, StageProxy)
        if not is_real or not leaf.requires_grad:
            return leaf
        return _Joined.apply(leaf, *inputs)  # type: ignore[no-untyped-call]

    return tree_map(joined, output) if inputs and torch.is_grad_enabled() else output


class _Joined(torch.autograd.Function):
    """A copy of the first argument; the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.inputs = len(inputs)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *([None] * ctx.inputs)


@contextmanager
def running(origins: frozenset[LossOrigin]) -> Iterator[None]:
    """Context in which the pipeline itself runs the backward of calls."""
    for origin in origins:
        origin.is_running = True
    try:
        yield
    finally:
        for origin in origins:
            origin.is_running = False


def origins_of(loss: Tensor) -> frozenset[LossOrigin]:
    """Return the calls that a loss was made of.

    Raises:
        UsageError: something else is in it, too, or no call.
    """
    refuse(wrong_in(loss))
    return frozenset(origin for origin in origins_in(loss) if isinstance(origin, LossOrigin))


def wrong_in(loss: Tensor) -> int:
    """Return the number of what is wrong with a loss, for ``refuse``; 0 where nothing is."""
    found = origins_in(loss)
    lacks = not found - {OTHER}
    wrong = (_ELSEWHERE in found, _BESIDE in found, lacks, OTHER in found)
    return wrong.index(True) + 1 if any(wrong) else 0


def refuse(number: int) -> None:
    """Refuse a loss in which ``wrong_in`` has found something.

    Raises:
        UsageError: says what, and the way out.
    """
    if number:
        raise UsageError(_WRONG[number - 1])


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a backward over stages does not have.

    Raises:
        UsageError: one of the options of ``Tensor.backward`` asks for something.
    """
    asked = [name for name, value in options.items() if value is not None and value is not False]
    if asked:
        raise UsageError(
            f"expected backward(loss) without options, found {', '.join(sorted(asked))}: a "
            "pipeline frees each micro-batch as its backward runs, so that there is no second "
            "backward and no derivative of gradients. Add losses of one forward before backward(), "
            "or run the forward again"
        )


class WaitingCall:
    """A call of the model whose backward has not come; it waits while somebody has its output.

    Attributes:
        output: the result of the call, until it is handed over.
        origin: the call, as its output knows it; likewise.
        numbers: of the micro-batches in the step.
    """

    output: Any
    origin: LossOrigin
    numbers: range

    def hand_over(self) -> Any:
        """Return the output, and keep nothing of it."""
        output = self.output
        del self.output, self.origin
        return output


class PromisedLoss(WaitingCall):
    """A batch of which nothing has been computed; its output stands for the mean loss.

    ``loss_of`` makes the loss of the model's output (L3); without it the output has the loss (L2).
    """

    def __init__(
        self,
        stages: LocalStages,
        batches: Sequence[MicroBatch],
        dtype: torch.dtype,
        weights: Weights,
        loss_of: LossOf | None = None,
    ) -> None:
        self._stages = stages
        self._batches, self.numbers = batches, range(len(batches))
        self._weights = weights
        self._loss_of = functools.partial(self._made, loss_of) if loss_of else loss_in
        self._made_outside = loss_of is not None
        kind = stages.device.type
        dtype_cast, casts = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._autocast = torch.autocast(kind, dtype=dtype_cast, enabled=casts)
        self.output = StageProxy.like((), dtype, stages.device, requires_grad=True)
        # The script may change its own in place.
        self._promised = same_value(self.output)
        self.origin = LossOrigin()
        self.origin.mark(self.output)

    def backward(self, loss: Tensor, synchronize: bool, schedule: str) -> None:
        """Run the whole schedule; the loss, or a multiple, then has its value."""
        stages = self._stages
        if not isinstance(loss, StageProxy):
            raise UsageError(
                "expected the loss that the model returned, or a multiple of it, found another "
                "tensor; under pipeline parallelism a model that makes its loss is asked for "
                "nothing else"
            )
        try:
            factor = slope_of(loss, self._promised)
        except ValuesNeededError:  # of a parameter, which is on another stage here alone
            with stages.telling():
                raise
        with self._autocast:
            for batch in self._batches:  # looks at new shapes, in which no targets count
                stages.dtype(batch)
            shares = shares_of(self._weights, self._batches, self._outline)
        plan = make_schedule(schedule, stages.ranks, len(self._batches), len(stages.workers))
        actions = plan.ranks[stages.rank]
        for worker in stages.workers.values():
            worker.batches = dict(enumerate(self._batches))
            worker.loss_of = self._loss_of
            worker.seeds = {i: factor * share for i, share in enumerate(shares) if share}
        stages.mark_final(actions if synchronize else ())
        try:
            with self._autocast, torch.enable_grad():
                stages.act(actions)
        finally:
            for worker in stages.workers.values():
                worker.loss_of = None
        total = torch.zeros((), dtype=self._promised.dtype, device=stages.device)
        if stages.last is not None:
            for index, share in enumerate(shares):
                if share:  # the loss of others may be no number
                    total += stages.last.losses[index] * share
        stages.share(total, "value of the loss")
        resolve(self._promised, total)

    def _made(self, loss_of: LossOf, output: Any, targets: Any) -> Tensor:
        """Make the loss of the model's output; whatever else goes in must want no gradient."""
        if not torch.is_grad_enabled():
            return loss_of(output, targets)
        LossOrigin(is_running=True).mark(output)
        loss = loss_of(output, targets)
        if loss.requires_grad:
            origins_of(loss)
        return loss

    def _outline(self, batch: MicroBatch) -> Any:
        """Make the loss of a micro-batch without computing any block."""
        output = self._stages.outline(batch)
        return self._loss_of(output, batch.targets) if self._made_outside else output


def loss_in(output: Any, targets: Any) -> Tensor:
    """Return the loss in a model's output.

    Raises:
        UsageError: there is none.
    """
    loss = find_loss(output)
    if loss is None:
        raise UsageError("expected a model that returns its loss for every micro-batch, found none")
    return loss


# --- a call of the model whose output is that of the whole batch, made of micro-batches ---

# All forwards come first, then all backwards (GPipe). Where the outputs of micro-batches are no
# parts of the whole batch's, whatever follows the blocks, such as a head and a loss, runs on the
# joined tensors of the blocks: the result is right for every function of them.


Made: TypeAlias = Mapping[int, Mapping[int, tuple[Tensor, ...]]]
"""The tensors of blocks, by micro-batch and block."""

LeafOf: TypeAlias = Callable[[int, Tensor], Tensor]
"""Gives the tensor that takes the place of a micro-batch's in the graph of the whole batch."""


def joined_blocks(made: Made, division: Division, leaf_of: LeafOf) -> dict[int, list[Tensor]]:
    """Return the tensors of each block, by index, for the whole batch."""
    first, *_ = made.values()
    return {
        block: [
            join(
                [leaf_of(number, tensors[block][place]) for number, tensors in made.items()],
                division.joins[block][place] if division.joins else None,
            )
            for place in range(len(tensors))
        ]
        for block, tensors in first.items()
    }


def joined_outputs(outputs: Mapping[int, Any], dims: Dims, leaf_of: LeafOf) -> Any:
    """Return the output of the whole batch, made of those of micro-batches by number.

    A single micro-batch needs no dims.
    """
    flat = {number: tree_leaves(output) for number, output in outputs.items()}
    firsts = next(iter(flat.values()))
    along = dims if len(flat) > 1 else (None,) * len(firsts)
    found = [
        join([leaf_of(number, leaves[place]) for number, leaves in flat.items()], dim)
        if isinstance(first, Tensor)
        else first
        for place, (first, dim) in enumerate(zip(firsts, along, strict=True))
    ]
    return tree_unflatten(found, tree_structure(next(iter(outputs.values()))))


@dataclass(frozen=True, slots=True)
class _Seam:
    """A leaf of the graph of the whole batch, and the tensor of a micro-batch behind it."""

    number: int
    part: Tensor
    leaf: Tensor


class WholeBatch(WaitingCall):
    """A call whose output is real on the last stage, and proxies before it."""

    def __init__(
        self, stages: LocalStages, call: DividedCall, numbers: range, outputs: Dims | None
    ) -> None:
        """Run the forwards.

        Args:
            stages: of this rank.
            call: what is asked for.
            numbers: see there.
            outputs: the dims along which the model's outputs for micro-batches are joined; None
                where all that follows the blocks must see the whole batch.
        """
        self._stages, self.numbers, self._number = stages, numbers, call.whole.number
        for worker in stages.workers.values():
            worker.batches |= dict(zip(numbers, call.parts, strict=True))
        self._seams: list[_Seam] = []
        if stages.last is None:
            stages.act(stages.actions(ActionKind.FORWARD, numbers))
            self.output = stages.outline(call.whole)
        else:
            real = handed_out(self._real(stages.last, call, outputs), leaves=True)
            self.output = behind_inputs(real, call.whole)
        self.origin = LossOrigin()
        self.origin.mark(self.output)
        mark_elsewhere(self.output, stages.last_blocks)

    def share(self) -> None:
        """Give the output its values on every stage; backward still begins on the last one.

        The other stages get tensors that know their call, so that a loss made of them is known,
        too: the ranks make it of equal values.
        """
        leaves, tree = tree_flatten(self.output)
        lacking = [isinstance(leaf, StageProxy) for leaf in leaves]
        at_last = [self._stages.last is not None and not lacks for lacks in lacking]
        agreed = self._stages.agree([*lacking, *at_last])
        known = agreed[len(leaves) :]
        wanted = [a and b for a, b in zip(agreed[: len(leaves)], known, strict=True)]
        shared = {place: self._shared(leaves[place]) for place, wants in enumerate(wanted) if wants}
        if self._stages.last is None:
            self.origin.mark(list(shared.values()))
        self.output = tree_unflatten(
            [shared.get(place, leaf) for place, leaf in enumerate(leaves)], tree
        )

    def _shared(self, leaf: Tensor) -> Tensor:
        """Return a tensor of the output with the values of the last stage."""
        lacks = isinstance(leaf, StageProxy)
        values = self._stages.output_of(leaf, None if lacks else leaf, self._stages.count - 1)
        if not lacks:
            return leaf
        # A view: the script may change it in place.
        return values.requires_grad_(leaf.requires_grad).view_as(values)

    def loss(self, targets: Any, loss_of: LossOf, dtype: torch.dtype) -> Tensor:
        """Return the loss that a function makes of the output: real on the last stage.

        Raises:
            UsageError: on all stages: something else goes into it.
        """
        wrong = 0
        if self._stages.last is None:
            loss: Tensor = StageProxy.like((), dtype, self._stages.device, requires_grad=True)
            self.origin.mark(loss)
        else:
            with self._stages.telling(), self._stages.dropout.forward(self._number):
                loss = loss_of(self.output, targets).to(dtype)
            wrong = wrong_in(loss) if loss.requires_grad else 0
        refuse(self._stages.agree([wrong])[0])
        self.hand_over()
        return loss

    def begin(self, loss: Tensor) -> None:
        """Run backward of a loss down to the blocks' tensors of this call and of others."""
        if (last := self._stages.last) is not None:
            inner, counting = self._stages.inner, last.counting(self.numbers[0])
            with self._stages.telling(), inner.accumulating(), counting:
                inner.backward(with_values(loss))

    def backward(self, synchronize: bool) -> None:
        """Run the backward of every micro-batch; to synchronize averages gradients over dp."""
        if self._stages.last is not None:
            self._seed(self._stages.last)
        actions = self._stages.actions(ActionKind.BACKWARD, self.numbers)
        self._stages.mark_final(actions if synchronize else ())
        self._stages.act(actions)

    def _real(self, last: StageWorker, call: DividedCall, outputs: Dims | None) -> Any:
        """Run the forwards; begin a graph of the whole batch at leaves."""
        last.kept = call.division.kept if outputs is None else None
        try:
            self._stages.act(self._stages.actions(ActionKind.FORWARD, self.numbers))
        finally:
            last.kept = None
        if outputs is not None:
            found = {number: last.outputs.pop(number) for number in self.numbers}
            return joined_outputs(found, outputs, self._leaf)
        made = {number: last.made.pop(number) for number in self.numbers}
        given = joined_blocks(made, call.division, self._leaf)
        # Views, so that what the rest changes in place is no leaf.
        views = {block: [x.view_as(x) for x in tensors] for block, tensors in given.items()}
        return self._stages.finish(last.stage, call.whole, views)

    def _leaf(self, number: int, part: Tensor) -> Tensor:
        leaf = part.detach().requires_grad_(part.requires_grad)
        self._seams.append(_Seam(number, part, leaf))
        return leaf

    def _seed(self, last: StageWorker) -> None:
        """Let each micro-batch's backward begin at the gradients that the loss gave its tensors."""
        seams: dict[int, list[_Seam]] = {number: [] for number in self.numbers}
        for seam in self._seams:
            if seam.leaf.grad is not None:
                seams[seam.number].append(seam)
        for number, some in seams.items():
            gradients = [seam.leaf.grad for seam in some if seam.leaf.grad is not None]
            last.begin_at(number, [seam.part for seam in some], gradients)
        self._seams.clear()


# --- evaluation: the output of the whole batch, with its values on every stage ---


class Evaluation:
    """Runs forwards of a model without backward.

    The last stage has the values of most outputs. Hidden states come from the stages of their
    blocks: which stage has which is found in the first call of each kind.
    """

    def __init__(self, stages: LocalStages) -> None:
        self._stages = stages
        self._sources: dict[Hashable, list[int]] = {}

    def run(self, call: DividedCall, dims: Dims | None) -> Any:
        """Return the output of the whole batch; metrics then need to know of no pipeline.

        The dims are the outputs' of ``WholeBatch``.

        Raises:
            UsageError: a part of the output exists on no stage; raised by all of them.
        """
        stages, whole = self._stages, call.whole
        leaves, tree = tree_flatten(stages.outline(whole))
        sources = self._sources.get(call.kind)
        if stages.is_new(sources is None):
            sources = None
        keeps = dims is None or len(call.parts) == 1
        workers = stages.run_forwards(call.parts, call.division.kept if keeps else None)
        asked = workers.keys() if sources is None else {stages.count - 1, *sources}
        passed = [output for worker in workers.values() for output in worker.outputs.values()]
        outputs = {
            index: joined_outputs(worker.outputs, dims or (), lambda _, x: x)
            if worker.kept is None
            else stages.finish(
                worker.stage,
                whole,
                joined_blocks(worker.made, call.division, lambda _, x: x),
                again=len(worker.made) == 1,
            )
            for index, worker in sorted(workers.items())
            if worker.stage.is_last or (index in asked and worker.kept is not None)
        }
        if sources is None:
            self._check_trees([*passed, *outputs.values()], tree)
            sources = self._sources[call.kind] = self._found(leaves, outputs)
        mine = {source: tree_leaves(output) for source, output in outputs.items()}
        found = [
            stages.output_of(leaf, mine[source][place] if source in mine else None, source)
            if isinstance(leaf, StageProxy)
            else leaf  # every stage has it
            for place, (leaf, source) in enumerate(zip(leaves, sources, strict=True))
        ]
        stages.free_sent()
        return tree_unflatten(found, tree)

    def _check_trees(self, outputs: Iterable[Any], expected: TreeSpec) -> None:
        """Check that blocks contribute to the output by their results alone."""
        differs = any(tree_flatten(output)[1] != expected for output in outputs)
        if any(self._stages.agree([differs])):
            raise UsageError(
                "expected an output made of what blocks return, found one with tensors that hooks "
                "collect inside of blocks, such as attention weights: the other pipeline stages "
                "have no such blocks. Call the model without them (output_attentions=False), or "
                "use no pipeline (pp: 1)"
            )

    def _found(self, leaves: Sequence[Any], outputs: Mapping[int, Any]) -> list[int]:
        """Return for each leaf of the output the last stage that has its values."""
        mine = [0] * len(leaves)
        for stage, output in sorted(outputs.items()):
            for place, leaf in enumerate(tree_leaves(output)):
                if not isinstance(leaf, StageProxy):
                    mine[place] = stage + 1
        found = [code - 1 for code in self._stages.agree(mine)]
        if min(found, default=0) < 0:
            missing = leaves[found.index(-1)]
            raise UsageError(
                f"expected an output whose tensors follow from blocks of one pipeline stage, found "
                f"one of shape {tuple(missing.shape)} that follows from several, or from a "
                "parameter that the model's first forward did not use and that lies on another "
                "stage: return the parts and put them together outside of the model, or use no "
                "pipeline (pp: 1)"
            )
        return found
