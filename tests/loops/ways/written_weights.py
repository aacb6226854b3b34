"""Written weights and optimizers of one's own: writes between steps, in forward, and odd rules."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from way_kit import Loop

MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}
BOUND = 0.0625


def _written(loop: Loop, write: Callable[[nn.Module], object]) -> None:
    """Take three steps, with a write into the model before each step."""
    model, optimizer = loop.ready(lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    for _ in loop.steps(model, optimizer, 3):
        write(model)


def _beside_masters(loop: Loop, write: Callable[[nn.Module], object]) -> None:
    """Write between two steps that leave weights as they are: these end as they were written."""
    loop.begin(**MASTERS)
    model = loop.model().float()  # masters are for weights in fp32
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.0))
    for step in range(2):
        loop.backward(loop.loss(model, loop.batch(step)))
        write(model)
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in (
        model.state_dict() if loop.alone else loop.accelerator.get_state_dict(model)
    ).items():
        loop.note(name, tensor.bfloat16().double())


def _each(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    def write(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)

    return write


# --- between backward and step ---


def weights_clamped(loop: Loop) -> None:
    _written(loop, _each(lambda p: p.clamp_(-BOUND, BOUND)))


def weights_clamped_through_data(loop: Loop) -> None:
    _written(loop, _each(lambda p: p.data.clamp_(-BOUND, BOUND)))


def a_head_made_anew(loop: Loop) -> None:
    _written(loop, lambda model: nn.init.constant_(model.last.weight, 0.25))


def weights_clamped_beside_masters(loop: Loop) -> None:
    _beside_masters(loop, _each(lambda p: p.clamp_(-BOUND, BOUND)))


def weights_clamped_through_data_beside_masters(loop: Loop) -> None:
    _beside_masters(loop, _each(lambda p: p.data.clamp_(-BOUND, BOUND)))


def averages_copied_in_beside_masters(loop: Loop) -> None:
    def copy(parameter: nn.Parameter) -> None:
        average = torch.linspace(-1, 1, parameter.numel(), dtype=torch.float32)
        parameter.data.copy_(average.view(parameter.shape))

    _beside_masters(loop, _each(copy))


# --- in forward ---


def _in_forward(
    loop: Loop,
    write: Callable[[Tensor], object] | None,
    max_norm: float | None = None,
    *,
    first: int = 0,
) -> None:
    """Train with forwards that write from a step on; from the first on also before training."""
    torch.manual_seed(0)
    given = _Table(write, max_norm)
    given.writes = write is not None and first == 0
    model, optimizer = loop.prepare(given, SGD(given.parameters(), lr=0.5))
    for step in range(first + 3):
        given.writes = write is not None and step >= first
        loop.step(optimizer, model(loop.part(torch.arange(8).flip(0))).square().mean())
    loop.weights(model)


def rows_of_the_batch_shortened_in_forward(loop: Loop) -> None:
    _in_forward(loop, None, max_norm=0.5)


def all_rows_clamped_in_forward(loop: Loop) -> None:
    _in_forward(loop, lambda weight: weight.clamp_(-0.5, 0.5))


class _Table(nn.Module):
    """A table that shortens the rows of a batch, or is written into by a forward that shall."""

    def __init__(self, write: Callable[[Tensor], object] | None, max_norm: float | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, max_norm=max_norm), nn.Linear(4, 2)
        self.write, self.writes = write, False
        self.example_inputs = {"t": torch.arange(4)}

    def forward(self, t: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.write(self.table.weight)
        return self.head(self.table(t))


def rows_clamped_in_later_forwards(loop: Loop) -> None:
    _in_forward(loop, lambda weight: weight.clamp_(-0.3, 0.3), first=2)


def rows_clamped_through_data_in_later_forwards(loop: Loop) -> None:
    _in_forward(loop, lambda weight: weight.data.clamp_(-0.3, 0.3), first=2)


# --- optimizers of one's own ---


class _Own(Optimizer):
    """SGD with a rule for gradients."""

    def __init__(self, groups: Any, rule: Callable[[dict[str, Any], Tensor], Tensor]) -> None:
        super().__init__(groups, {"lr": 0.1, "matrix": False})
        self.rule = rule
        self.norms: list[Tensor] = []
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.add_(self.rule(group, p.grad), alpha=-group["lr"] / self.counts["steps"])


class _ClipsAll(_Own):
    """Clips by a norm over all of its parameters, where that is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norms.append(torch.stack([grad.norm() for grad in held]).norm())
        factor = (6.0 / self.norms[-1]).clamp(max=1.0)
        self.rule = lambda group, grad: grad * factor
        super().step()


class _Lookahead(Optimizer):
    """A wrapper that goes half of the way each second step, and shares all with the inner one."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.calls = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._patch_step_function()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.calls += 1
        for p in (p for g in self.param_groups for p in g["params"] if self.calls % 2 == 0):
            slow = self.state[p].setdefault("slow", p.clone())
            slow.lerp_(p, 0.5)
            p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


def _plain(group: dict[str, Any], grad: Tensor) -> Tensor:
    return grad


def _normalized(group: dict[str, Any], grad: Tensor) -> Tensor:
    return grad / grad.norm() if group["matrix"] else grad


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    given = list(model.parameters())
    return [
        {"params": [p for p in given if p.dim() == 1]},
        {"params": [p for p in given if p.dim() > 1], "matrix": True},
    ]


def _stepped(loop: Loop, make: Callable[[nn.Module], Optimizer], factor: float = 1.0) -> None:
    model = loop.model()
    given = make(model)
    calls = getattr(given, "calls", 0)
    model, optimizer = loop.prepare(model, given)
    loop.note("calls before the first step", float(calls == getattr(given, "calls", 0)))
    for step in range(4):
        loop.step(optimizer, loop.loss(model, loop.batch(step)) * factor)
    loop.weights(model)


def an_optimizer_that_counts_in_a_dict(loop: Loop) -> None:
    _stepped(loop, lambda m: _Own(m.parameters(), _plain))


def a_rule_for_matrices_in_the_second_group(loop: Loop) -> None:
    _stepped(loop, lambda m: _Own(_groups(m), _normalized))


def a_wrapper_around_an_elementwise_optimizer(loop: Loop) -> None:
    _stepped(loop, lambda m: _Lookahead(SGD(m.parameters(), lr=0.1, momentum=0.9)))


def a_wrapper_around_a_rule_for_matrices(loop: Loop) -> None:
    _stepped(loop, lambda m: _Lookahead(_Own(_groups(m), _normalized)))


def an_optimizer_that_clips_by_its_own_norm(loop: Loop) -> None:
    _stepped(loop, lambda m: _ClipsAll(m.parameters(), _plain), factor=100.0)
