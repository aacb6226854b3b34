"""Of which calls of the model a loss was made: whatever comes out of a call knows the call.

A script may make one loss of several calls, and may run backwards in any order. What else with a
gradient it adds to a loss would count on the last stage alone, and what it differentiates by itself
would stay there: both must not go unseen on any stage.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.proxy import OTHER, StageProxy

_KEY = "drivetrain_megatron.call"
"""Under which a node of autograd's graph keeps the call that it came out of."""


class Origin:
    """One call of the model, known by its identity."""

    def __init__(self) -> None:
        self._running = False

    def mark(self, output: Any) -> list[Node]:
        """Let tensors know that they came out of this call.

        Args:
            output: of the call: tensors in any structure.

        Returns:
            What must be kept as long as the call waits for its backward.
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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the pipeline itself runs backward."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _check_running(self, gradient: Tensor) -> None:
        if not self._running:
            raise UsageError(
                "expected accelerator.backward(loss), found a backward of its own on what a "
                "pipeline returned: the pipeline runs backward on all stages together"
            )


@contextmanager
def running(origins: frozenset[Origin]) -> Iterator[None]:
    """Context in which the pipeline itself runs the backward of calls."""
    with ExitStack() as stack:
        for origin in origins:
            stack.enter_context(origin.running())
        yield


def origins_of(loss: Tensor) -> frozenset[Origin]:
    """Return the calls that a loss was made of.

    Args:
        loss: a proxy, or real.

    Raises:
        UsageError: it was made of something else, too, or of no call.
    """
    found = loss.origins if isinstance(loss, StageProxy) else _traced(loss)
    if not found - {OTHER}:
        raise UsageError(
            "expected a loss made of what a forward of the model returned, found one made of none: "
            "call the model with gradients enabled, and make the loss of its output"
        )
    if OTHER in found:
        raise UsageError(
            "expected a loss made of nothing but what the model returned, found something else in "
            "it that wants a gradient, such as a penalty on parameters: it would count on the last "
            "pipeline stage alone. Use the optimizer's weight_decay for a penalty, or add its "
            "gradient to each parameter.grad after backward()"
        )
    return frozenset(origin for origin in found if isinstance(origin, Origin))


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse what a backward over stages cannot do.

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
    """Return where a real loss comes from, by its graph down to what calls returned."""
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
