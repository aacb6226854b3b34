"""The loss of a batch in a pipeline: of which calls it was made, and its value, made in backward.

A script may make one loss of several calls of the model, and may run backwards in any order, so
whatever comes out of a call knows the call (``LossOrigin``).

L2: the model returns its loss. L3: the script hands a loss function over. Either way the loss of a
batch is promised (``PromisedLoss``), and made while its backward runs, in any schedule, as the
weighted sum of the micro-batches' losses (``shares``).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.batches import MicroBatch
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.schedules import make_schedule
from drivetrain_megatron.pipeline.shares import Weights, shares_of
from drivetrain_megatron.pipeline.worker import LossOf, find_loss
from drivetrain_megatron.recording.proxy import (
    OTHER,
    OWN_BACKWARD,
    StageProxy,
    resolve,
    same_value,
    slope_of,
)

_KEY = "drivetrain_megatron.call"
"""Under which a node of autograd's graph keeps the call that it came out of."""


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

    def __init__(self) -> None:
        self.is_running = False

    def mark(self, output: Any) -> list[Node]:
        """Let tensors, in any structure, know that they came out of this call.

        Returns:
            Nodes of their graphs, to be kept as long as the call waits for its backward.
        """
        nodes = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, StageProxy):
                leaf.origins = frozenset({self}) if leaf.requires_grad else frozenset()
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                nodes.append(get_gradient_edge(leaf).node)
                _metadata(nodes[-1])[_KEY] = self
                leaf.register_hook(self._check_running)  # type: ignore[no-untyped-call]
        return nodes

    def _check_running(self, gradient: Tensor) -> None:
        if not self.is_running:
            raise UsageError(OWN_BACKWARD)


def handed_out(output: Any) -> Any:
    """Return an output with views: an earlier stage's own backward passes the tensors themselves.

    A script's backward passes the views, and is refused there.
    """

    def view(leaf: Any) -> Any:
        has_graph = isinstance(leaf, Tensor) and leaf.requires_grad
        return leaf.view_as(leaf) if has_graph and not isinstance(leaf, StageProxy) else leaf

    return tree_map(view, output)


def mark_elsewhere(output: Any, blocks: range) -> None:
    """Let parts of an output know that they are on other stages than the last, on every rank.

    Args:
        output: of the model, in any structure.
        blocks: those whose tensors the last stage has.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, StageProxy) and leaf.requires_grad and not leaf.blocks <= {*blocks}:
            leaf.origins = frozenset({_ELSEWHERE})


def mark_beside(output: Any) -> None:
    """Let the proxies of an output know that they stand beside a loss that is promised."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, StageProxy) and leaf.requires_grad:
            leaf.origins = frozenset({_BESIDE})


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
    return frozenset(origin for origin in _found(loss) if isinstance(origin, LossOrigin))


def wrong_in(loss: Tensor) -> int:
    """Return the number of what is wrong with a loss, for ``refuse``; 0 where nothing is."""
    found = _found(loss)
    lacks = not found - {OTHER} and not (OTHER in found and isinstance(loss, StageProxy))
    wrong = (_ELSEWHERE in found, _BESIDE in found, lacks, OTHER in found)
    return wrong.index(True) + 1 if any(wrong) else 0


def refuse(number: int) -> None:
    """Refuse a loss in which ``wrong_in`` has found something.

    Raises:
        UsageError: says what, and the way out.
    """
    if number:
        raise UsageError(_WRONG[number - 1])


def _found(loss: Tensor) -> frozenset[object]:
    return loss.origins if isinstance(loss, StageProxy) else _traced(loss)


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


def _traced(loss: Tensor) -> frozenset[object]:
    """Return the calls of which a real loss was made, by its graph down to their outputs."""
    found: set[object] = set()
    waiting: list[Node] = [get_gradient_edge(loss).node] if loss.requires_grad else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        origin = _metadata(node).get(_KEY)
        nexts = {following for following, _ in node.next_functions if following is not None}
        if origin is not None:
            found.add(origin)
        elif not nexts:
            found.add(OTHER)  # a leaf, which gets a gradient
        else:
            waiting += nexts - seen
            seen |= nexts
    return frozenset(found)


def _metadata(node: Node) -> dict[str, Any]:
    content: Any = node.metadata
    return content() if callable(content) else content  # type: ignore[no-any-return]


class PromisedLoss:
    """A batch of which nothing has been computed.

    ``loss_of`` makes the loss of the model's output (L3); without it the output has the loss (L2).

    Attributes:
        loss: stands for the mean over the batch.
        origin: the call, as the loss knows it.
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
        self._batches = batches
        self._weights = weights
        self._loss_of = functools.partial(self._made, loss_of) if loss_of else loss_in
        self._made_outside = loss_of is not None
        self._autocast = _autocast(stages.device)
        self.loss: StageProxy = StageProxy.like((), dtype, stages.device, requires_grad=True)
        # The script may change its own in place.
        self._promised = same_value(self.loss)
        self.origin = LossOrigin()
        self.origin.mark(self.loss)

    def backward(
        self, loss: Tensor, synchronize: bool, schedule: str, *, counts: bool = True
    ) -> None:
        """Run the whole schedule; the loss, or a multiple, then has its value.

        Where the loss does not count, backward begins nowhere.
        """
        stages = self._stages
        factor = _factor(loss, self._promised)
        shares = shares_of(self._weights, self._batches, self._outline)
        plan = make_schedule(schedule, stages.ranks, len(self._batches), len(stages.workers))
        actions = plan.ranks[stages.rank]
        for worker in stages.workers.values():
            worker.batches = dict(enumerate(self._batches))
            worker.loss_of = self._loss_of
            counted = shares if counts else ()
            worker.seeds = {i: factor * share for i, share in enumerate(counted) if share}
        stages.mark_final(actions if synchronize else ())
        try:
            with _casting(self._autocast), torch.enable_grad():
                stages.act(actions)
        finally:
            for worker in stages.workers.values():
                worker.loss_of = None
        total = torch.zeros((), dtype=self.loss.dtype, device=stages.device)
        if stages.last is not None:
            for index, share in enumerate(shares):
                if share:  # the loss of others may be no number
                    total += stages.last.losses[index] * share
        stages.broadcast(total, "value of the loss")
        resolve(self._promised, total)

    def _made(self, loss_of: LossOf, output: Any, targets: Any) -> Tensor:
        """Make the loss of the model's output; whatever else goes in must want no gradient."""
        if not torch.is_grad_enabled():
            return loss_of(output, targets)
        self.origin.mark(output)
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


def _factor(loss: Tensor, promised: StageProxy) -> Tensor:
    """Return the derivative of a loss by the promised loss."""
    if not isinstance(loss, StageProxy):
        raise UsageError(
            "expected the loss that the model returned, or a multiple of it, found another tensor; "
            "under pipeline parallelism a model that makes its loss is asked for nothing else"
        )
    return slope_of(loss, promised)


_Autocast = tuple[str, torch.dtype, bool]
"""Kind of device, dtype, whether it is on."""


def _autocast(device: torch.device) -> _Autocast:
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@contextmanager
def _casting(autocast: _Autocast) -> Iterator[None]:
    kind, dtype, enabled = autocast
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        yield
