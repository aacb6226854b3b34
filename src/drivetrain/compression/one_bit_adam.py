"""1-bit Adam: momenta cross slow links in place of gradients, and variances are frozen.

Paper: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed", ICML 2021 (arXiv 2102.02888), algorithm 1. The first steps are exact steps of
Adam. From then on, for a host h, its mean gradient g_h, the common momentum m and the error e_h::

    sent      C(beta1 m + (1 - beta1) g_h + e_h)    e_h keeps what C, the method of the link, leaves
    m'        the mean over hosts, encoded once more with an error of its own
    w         w - lr m' / (1 - beta1^t) / (sqrt(v) + eps)

A strategy sums gradients over hosts. ``FrozenAdam.exchange`` takes the two lines of the exchange:
before a sum it turns gradients into momenta. After the sum all hosts know the same m', and it turns
m' into the gradient that would have led to it, (m' - beta1 m) / (1 - beta1): so a second backward
adds to a gradient as ever. A factor by which gradients are multiplied after the sum, as for a short
window or for weighted losses, goes into the momenta before the sum: otherwise the factor would
multiply the error of the whole momentum. The step of ``FrozenAdam`` starts from that gradient.

An element moves no further than Adam's own bound of a step, and stays if the warm-up saw no
gradient of it. The frozen variance is v / (1 - beta2^t), without the bias of the first steps. At
each step v itself moves as if each new squared gradient were the frozen variance: then
``exp_avg_sq`` and ``step`` are at all times a state with which an exact Adam can go on.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.compression.compressor import Fidelity
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.outline import FarLinks
from drivetrain.config.schema import LOW_WORDS, Policy
from drivetrain.errors import ConfigError, UsageError
from drivetrain.log import get_logger
from drivetrain.runtime.precision import LOW

logger = get_logger(__name__)

PIECE = 2**15
"""Elements of a piece: in fp32, six of them fit into a megabyte of a processor's caches."""

REFUSED = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
"""Options of torch's Adam that change the update, or where ``step`` lives."""


def check_momentum(strategy: str, links: FarLinks, precision: Policy) -> None:
    """Refuse methods for which momenta are of no use, a loss scale, and gradients of low precision.

    Args:
        strategy: its name, for the errors.
        links: the methods of the run.
        precision: the dtypes of the run.

    Raises:
        ConfigError: says what to change.
    """
    method = links.gradients
    if method is None or method.fidelity_of("gradients").within(Fidelity.ROUNDING):
        raise ConfigError(
            f"{strategy}: expected with exchange: momentum a method with a trajectory of its own, "
            "such as links.far.gradients: onebit, found "
            f"{links.name_for('gradients')}; name one, or take exchange: gradients"
        )
    if links.warmup < 1:
        raise ConfigError(
            f"{strategy}: expected links.far.warmup_steps of at least 1 with exchange: momentum, "
            f"found {links.warmup}: the exact steps find the variances; take a fifth of all steps"
        )
    if precision.needs_scaling:
        raise ConfigError(
            f"{strategy}: expected precision: bf16 or no with exchange: momentum, found fp16: "
            "gradients of a loss scale do not add up with momenta; change one of them"
        )
    wire = precision.reduce or precision.param
    if wire in LOW_WORDS:
        raise ConfigError(
            f"{strategy}: expected momenta of fp32 between ranks with exchange: momentum, found "
            f"{precision}, which sends gradients as {wire}; set dtypes.reduce: fp32, or take "
            "exchange: gradients"
        )


def frozen_adam(
    strategy: str, exchange: str, links: LinkMethods, *, far: bool
) -> "FrozenAdam | None":
    """Return the steps after the warm-up, if the option ``exchange`` asks for momenta.

    Args:
        strategy: its name, for errors.
        exchange: ``momentum`` or ``gradients``.
        links: the methods of the run.
        far: whether a method is in use between hosts; without one, Adam stays what it is.
    """
    if exchange != "momentum":
        return None
    if far:
        return FrozenAdam(strategy, links.warmup)
    logger.announce(
        "exchange: momentum: no gradients cross hosts by a method for links here, so Adam steps "
        "exactly"
    )
    return None


def refuse_clipping(adam: "FrozenAdam | None") -> None:
    """Refuse clipping by norm where momenta are exchanged.

    Raises:
        UsageError: they are.
    """
    if adam is not None:
        raise UsageError(
            "expected no clipping by norm under exchange: momentum, whose gradients have the "
            "errors of the momenta ten times as large, found clip_grad_norm; leave it out, or "
            "take exchange: gradients"
        )


class FrozenAdam:
    """The steps of torch's Adam and AdamW after the warm-up, with frozen variances.

    A parameter's own count of steps says when its variance is frozen. State, groups and schedules
    are those of the optimizer, whose own step then sees no gradient of such a parameter.

    Args:
        strategy: the name of the strategy that it steps for.
        warmup: exact steps of each parameter.

    Attributes:
        factor: by which gradients are multiplied after the next sums.
    """

    def __init__(self, strategy: str, warmup: int) -> None:
        self.factor = 1.0
        self._strategy = strategy
        self._warmup = warmup
        self._exchanged: set[nn.Parameter] = set()
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose steps are others.

        Raises:
            ConfigError: the optimizer is no plain Adam or AdamW.
        """
        if type(optimizer) not in (Adam, AdamW):
            raise ConfigError(
                f"{self._strategy}: expected torch.optim.Adam or AdamW with exchange: momentum, "
                f"found {type(optimizer).__name__}; take one of them, or exchange: gradients"
            )
        set_options = {key for group in optimizer.param_groups for key in REFUSED if group.get(key)}
        if set_options:
            raise ConfigError(
                f"{self._strategy}: expected {type(optimizer).__name__} without "
                f"{', '.join(REFUSED)} with exchange: momentum, found "
                f"{', '.join(sorted(set_options))}; leave them out, or take exchange: gradients"
            )

    def _refuse_low(self, tensors: Iterable[Tensor]) -> None:
        low = {str(each.dtype) for each in tensors if each.dtype in LOW}
        if low:
            raise ConfigError(
                f"{self._strategy}: expected momenta and variances of fp32 with exchange: "
                f"momentum, found {', '.join(sorted(low))}; give the model in fp32, set "
                "dtypes.master and dtypes.reduce: fp32 under fsdp, or take exchange: gradients"
            )

    def _check_all(self, optimizer: Optimizer) -> None:
        self.check(optimizer)
        self._refuse_low(each for group in optimizer.param_groups for each in group["params"])

    def add(self, optimizer: Optimizer) -> None:
        """Step one more optimizer's parameters, or the fragments in their places.

        Raises:
            ConfigError: the optimizer is no plain Adam or AdamW, or steps in low precision.
        """
        self._check_all(optimizer)
        self._optimizers.append(optimizer)
        self._handles += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Leave the steps to the optimizers."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def exchange(self, gradients: Mapping[nn.Parameter, Tensor], ranks: int) -> Callable[[], None]:
        """Turn gradients into momenta, in place, where the parameter's variance is frozen.

        Args:
            gradients: this rank's summands of the mean gradients, by parameter. Zeros of a
                parameter without a gradient count as a gradient.
            ranks: how many of them are summed up.

        Returns:
            Turns the sum of the momenta into the gradient that leads to it, in place.

        Raises:
            ConfigError: gradients cross in low precision.
        """
        self._refuse_low(gradients.values())
        self._exchanged.update(gradients)
        among, factor = frozenset(gradients), self.factor
        sent = [
            (gradients[parameter], float(group["betas"][0]), optimizer.state[parameter]["exp_avg"])
            for optimizer in self._optimizers
            for group, parameter in self._frozen(optimizer, among)
        ]
        for values, beta, momentum in sent:
            for new, old in in_pieces(values, momentum):
                new.mul_((1 - beta) * factor).add_(old, alpha=beta / ranks)

        @torch.no_grad()
        def turn_back() -> None:
            for values, beta, momentum in sent:
                for new, old in in_pieces(values, momentum):
                    new.sub_(old, alpha=beta).div_((1 - beta) * factor)

        return turn_back

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        """Step the parameters whose variance is frozen, and hide their gradients.

        Raises:
            ConfigError: the optimizer's groups have changed, and its steps are others now.
            UsageError: the step has a closure, whose gradients would come too late.
        """
        self._check_all(optimizer)
        # torch passes the optimizer itself as the first argument of a step.
        if any(callable(each) for each in [*args[1:], *kwargs.values()]):
            raise UsageError(
                "expected optimizer.step() without a closure under exchange: momentum; call "
                "backward before the step, or take exchange: gradients"
            )
        # Parameters of another strategy step as ever.
        for group, parameter in self._frozen(optimizer, self._exchanged):
            if parameter.grad is not None:
                self._step(parameter, parameter.grad, group, optimizer.state[parameter])
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _after_step(self, *_: Any) -> None:
        """Give the parameters their gradients back."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _frozen(
        self, optimizer: Optimizer, among: Collection[nn.Parameter]
    ) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter) if parameter in among else None
                if state and int(state["step"]) >= self._warmup:
                    yield group, parameter

    def _step(
        self, weight: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        state["step"] += 1
        factors = FrozenFactors.of(group, int(state["step"]))
        whole = (weight, gradient, state["exp_avg"], state["exp_avg_sq"])
        for values, grads, momentum, variance in in_pieces(*whole):
            _frozen_step(values, grads, momentum, variance, factors)


class FrozenFactors(NamedTuple):
    """The numbers of a step of one parameter.

    Attributes:
        rate: of learning, without the momentum's bias.
        momentum: share of the gradient in the new momentum.
        variance: factor of the variance, whose bias is another than a step before.
        root: factor of the variance's root, without its bias.
        longest: most of a root by which the momentum moves an element.
        eps: is added to the root.
        decay: of the weight, decoupled from the gradient.
        penalty: of the weight, as a part of the gradient.
    """

    rate: float
    momentum: float
    variance: float
    root: float
    longest: float
    eps: float
    decay: float
    penalty: float

    @classmethod
    def of(cls, group: dict[str, Any], step: int) -> "FrozenFactors":
        """Return the factors of a step, counted from 1, for parameters of a group."""
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        beta1, beta2 = map(float, group["betas"])
        unbiased, bias = 1 - beta1**step, 1 - beta2**step
        decoupled = bool(group["decoupled_weight_decay"])
        return cls(
            rate=lr / unbiased,
            momentum=1 - beta1,
            variance=bias / (1 - beta2 ** (step - 1)),
            root=1 / math.sqrt(bias),
            longest=longest_step(beta1, beta2) * unbiased,
            eps=float(group["eps"]),
            decay=1 - lr * decay if decoupled else 1.0,
            penalty=0.0 if decoupled else decay,
        )


def _frozen_step(
    weight: Tensor, gradient: Tensor, momentum: Tensor, variance: Tensor, factors: FrozenFactors
) -> None:
    """Step a piece of a parameter by Adam, without a change of the variance."""
    variance.mul_(factors.variance)
    if factors.penalty:
        gradient = gradient.add(weight, alpha=factors.penalty)
    momentum.lerp_(gradient, factors.momentum)
    root = variance.sqrt().mul_(factors.root)
    # A method may send much for an element of which the warm-up saw next to nothing: without
    # Adam's own bound of a step, such an element would be flung away.
    bound = root * factors.longest
    momentum.clamp_(-bound, bound)
    if factors.decay != 1:
        weight.mul_(factors.decay)
    weight.addcdiv_(momentum, root.add_(factors.eps), value=-factors.rate)


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of tensors of one shape, which several passes find in a processor's caches."""
    if tensors[0].device.type != "cpu" or not all(each.is_contiguous() for each in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(each.view(-1), PIECE) for each in tensors), strict=True)


def longest_step(beta1: float, beta2: float) -> float:
    """Return the most learning rates by which a step of Adam moves an element.

    Kingma and Ba, "Adam", ICLR 2015 (arXiv 1412.6980), section 2.1.
    """
    return max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
