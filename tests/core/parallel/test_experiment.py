"""The experiment whether an optimizer may step a rank's parts: what it finds, and leaves alone."""

import random
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from drivetrain.parallel.suitability import ELEMENT_WISE, misfit

CUTS = ("flat", "rows", "whole")


class Plain(optim.Optimizer):
    """SGD with a rule of its own, made by a subclass; begins with ``begin``."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, {"lr": 0.01, **options})
        self.steps = 0
        self.made()

    def made(self):
        pass

    def begin(self):
        pass

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.rule(group, p), alpha=-group["lr"])

    def rule(self, group, p):
        return p.grad


def normalized(p):
    return p.grad / p.grad.norm()


class Lion(Plain):
    def rule(self, group, p):
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        update = torch.lerp(p.grad, mean, 0.9).sign_()
        mean.lerp_(p.grad, 0.01)
        return update


class Counts(Plain):
    """Counts steps in a dict, and keeps a history in a list."""

    def made(self):
        self.counts, self.norms = {"steps": 0}, []

    def begin(self):
        self.counts["steps"] += 1
        self.norms.append(sum(p.grad.norm() for p in self.param_groups[0]["params"]))

    def rule(self, group, p):
        return p.grad / self.counts["steps"]


class Assigns(Plain):
    """Changes gradients in place, and gives parameters other memory, as older code does."""

    def rule(self, group, p):
        p.grad.mul_(2.0)
        p.data = p.data * 0.9
        return p.grad


class SecondGroup(Plain):
    def rule(self, group, p):
        return normalized(p) if group.get("matrix") else p.grad


class ManyRows(Plain):
    def rule(self, group, p):
        return normalized(p) if p.dim() > 1 and p.shape[0] >= 200 else p.grad


class EveryFourth(Plain):
    def rule(self, group, p):
        return normalized(p) if p.dim() > 1 and self.steps % 4 == 0 else p.grad


class Lamb(Plain):
    def rule(self, group, p):
        return p.grad * (p.norm() / p.grad.norm())


class ClipsAll(Plain):
    """As LAMB and Adan do with max_grad_norm, over all parameters; large gradients alone."""

    def begin(self):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        self.factor = min(1.0, 6.0 / float(norm))

    def rule(self, group, p):
        return p.grad * self.factor


class ClipsOwnList(Plain):
    """Looks at a list of its own, whose parameters no rank replaces by its parts."""

    def made(self):
        self.mine = [p for group in self.param_groups for p in group["params"]]

    def begin(self):
        nn.utils.clip_grad_norm_([p for p in self.mine if p.grad is not None], 1.0)


class Around(optim.Optimizer):
    """A wrapper, as Lookahead is often written: it shares the groups of the inner one."""

    def __init__(self, base):
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults = base.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure=None):
        self.base.step()


class StepsBy(Plain):
    """Steps by what another function keeps to itself."""

    def __init__(self, parameters, keep):
        super().__init__(parameters)
        self.run = keep(optim.SGD(self.param_groups[0]["params"], lr=0.1))

    def begin(self):
        self.run()


def in_generator(inner):
    def steps():
        while True:
            yield inner.step()

    return steps().__next__


class Draws(Plain):
    def made(self):
        self.generator, self.random = torch.Generator(), random.Random(3)
        self.lock, self.model = threading.Lock(), nn.Linear(3, 3)

    def rule(self, group, p):
        random.random()
        noise = torch.rand((), generator=self.generator) + torch.rand(()) + self.random.random()
        return p.grad * (1 + noise)


class Nothing(Plain):
    def rule(self, group, p):
        return torch.zeros_like(p)


@pytest.fixture(scope="module")
def parameters():
    torch.manual_seed(0)
    shapes = ((300, 40), (40, 24, 3, 3), (40,), ())
    return [*(nn.Parameter(torch.randn(s)) for s in shapes), nn.Parameter(torch.randn(9, 30).t())]


def matrices(parameters):
    return [p for p in parameters if p.dim() == 2]


def test_elementwise_optimizers_fit_every_cut(parameters):
    made = [
        *(kind(parameters) for kind in (*ELEMENT_WISE, Lion, Counts, Assigns)),
        optim.AdamW(parameters, amsgrad=True, maximize=True, fused=True),
        optim.AdamW(parameters, foreach=True, capturable=True),
        optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
        optim.SGD(parameters, lr=torch.tensor(0.0), momentum=0.9, nesterov=True, maximize=True),
        optim.RMSprop(parameters, centered=True, momentum=0.9),
        optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(parameters)]),
        Around(optim.Adam(parameters)),
    ]
    for optimizer in made:  # with a scheduler's hold on step() none is taken for granted
        optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    wrong = [(type(o).__name__, cut) for o in made for cut in ("flat", "rows") if misfit(o, cut)]
    assert not wrong


def test_rules_that_need_more_than_a_rank_has_are_found(parameters):
    """The reason says whether whole parameters would do."""
    small = [p for p in parameters if p.dim() != 2]
    groups = [{"params": small}, {"params": matrices(parameters), "matrix": True}]
    of_matrices = [
        SecondGroup(groups),
        *(kind(parameters) for kind in (ManyRows, EveryFourth, Lamb, optim.Adafactor)),
        optim.Muon(matrices(parameters)),
        Around(Lamb(parameters)),
    ]
    for optimizer in of_matrices:
        name = type(optimizer).__name__
        assert misfit(optimizer, "flat").needs_matrices, name
        if not isinstance(optimizer, ManyRows):
            assert misfit(optimizer, "whole") is None, name
    of_all = [
        *(kind(parameters) for kind in (ClipsAll, ClipsOwnList, Draws)),
        StepsBy(parameters, lambda inner: inner.step),
        StepsBy(parameters, lambda inner: lambda: inner.step(None)),
    ]
    for optimizer in of_all:
        for cut in ("flat", "whole"):
            assert "all parameters at once" in misfit(optimizer, cut).why, type(optimizer)
    reasons = {
        "TypeError.*closure": optim.LBFGS(parameters),
        "nothing is proved": Nothing(parameters),
        "cannot be tried": StepsBy(parameters, in_generator),
    }
    for words, optimizer in reasons.items():
        with pytest.raises(ValueError, match=words):
            raise ValueError(misfit(optimizer, "whole").why)


def test_an_experiment_leaves_no_trace(parameters):
    """Not in lists, dicts, inner optimizers, generators, hooks, parameters and their gradients."""
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    counts, draws = Counts(parameters), Draws(parameters)
    inner = Counts(parameters)
    counts.register_step_post_hook(lambda *_: seen.append(2))
    before = [p.detach().clone() for p in parameters]
    generators = torch.get_rng_state(), random.getstate(), draws.generator.get_state()
    for optimizer in (counts, draws, Around(inner)):
        for cut in CUTS:
            misfit(optimizer, cut)
    handle.remove()
    assert not seen
    for optimizer in (counts, inner):
        assert (optimizer.steps, optimizer.counts, optimizer.norms) == (0, {"steps": 0}, [])
        assert not optimizer.state
        assert [len(g["params"]) for g in optimizer.param_groups] == [5]
        assert optimizer.param_groups[0]["lr"] == 0.01
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert torch.equal(generators[2], draws.generator.get_state())
    assert draws.random.random() == random.Random(3).random()
    for p, old in zip(parameters, before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
