"""1-bit Adam by hand, in one process, on an awkward model; and a method that loses nothing."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from drivetrain import Accelerator
from drivetrain.compression.compressor import Codec, Compressor
from drivetrain.errors import ConfigError
from drivetrain_compression.codes import OneBit
from stacks import Parts

WARMUP, STEPS, TOKENS = 3, 8, 64
LIMIT = 1e-5
"""The largest difference of a weight after updates of up to 0.01: messages are of fp32."""


def awkward(width: int = 48) -> nn.Module:
    """Return rows that no batch uses, tied weights, a frozen layer, a branch for some ranks."""
    torch.manual_seed(3)

    def compute(m: Parts, tokens: Tensor, *, branch: bool) -> Tensor:
        hidden = m.norm(m.frozen(m.inner(m.table(tokens))).tanh())
        hidden = hidden + m.branch(hidden) if branch else hidden
        return m.head(hidden).square().mean()

    layers = {name: nn.Linear(width, width) for name in ("inner", "frozen", "branch")}
    layers["frozen"].requires_grad_(False)
    table, head = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS, bias=False)
    head.weight = table.weight
    return Parts(compute, table=table, **layers, norm=nn.LayerNorm(width), head=head).double()


class ExactSigns(OneBit):
    """A double of a method: it keeps errors, and loses nothing."""

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    encode_gradients, add, keep = Codec.encode_gradients, Codec.add, Codec.keep

    def encode(self, values: Tensor, message: Tensor) -> None:
        message.copy_(values.view(torch.uint8))

    def decode(self, message: Tensor, values: Tensor) -> None:
        values.view(torch.uint8).copy_(message)


def batch(step: int, rank: int, micro: int = 0, together: int = 1) -> tuple[Tensor, bool]:
    """Return tokens, and whether the rank takes the branch, as its ``together`` neighbors do."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(TOKENS - 9, (6, 5), generator=generator), rank < together or step == 1


def optimizer_of(model: nn.Module, kind: type) -> Adam:
    matrices = [each for each in model.parameters() if each.requires_grad and each.dim() > 1]
    vectors = [each for each in model.parameters() if each.requires_grad and each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "betas": (0.8, 0.95)}]
    return kind(groups, lr=0.01)


def window_gradients(
    model: nn.Module, step: int, rank: int, window: int, together: int
) -> dict[nn.Parameter, Tensor]:
    model.zero_grad()
    for micro in range(window):
        tokens, branch = batch(step, rank, micro, together)
        (model(tokens, branch=branch) / window).backward()
    return {each: each.grad.clone() for each in model.parameters() if each.grad is not None}


def reference(
    ranks: int, kind: type, *, width: int = 48, window: int = 1, together: int = 1
) -> nn.Module:
    """Train in one process: exact steps of Adam, then algorithm 1 with an exact exchange."""
    model = awkward(width)
    optimizer = optimizer_of(model, kind)
    for step in range(STEPS):
        each = [window_gradients(model, step, rank, window, together) for rank in range(ranks)]
        gradients = {
            p: [one.get(p, torch.zeros_like(p)) for one in each]
            for p in {p for o in each for p in o}
        }
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
            if step >= WARMUP:
                frozen_steps(group, optimizer.state, gradients, step, kind)
        if step < WARMUP:
            for p, own in gradients.items():
                p.grad = sum(own) / ranks
            optimizer.step()
    return model


@torch.no_grad()
def frozen_steps(group: dict, states: dict, gradients: dict, step: int, kind: type) -> None:
    """Step with the mean of the ranks' momenta and the variances of the end of the warm-up."""
    lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    for p in group["params"]:
        state = states[p]
        frozen = state.setdefault("frozen", state["exp_avg_sq"] / (1 - beta2**WARMUP))
        decayed = [each + (decay * p if kind is Adam else 0) for each in gradients[p]]
        momenta = [beta1 * state["exp_avg"] + (1 - beta1) * each for each in decayed]
        bound = max(1, (1 - beta1) / (1 - beta2) ** 0.5) * (1 - beta1 ** (step + 1)) * frozen.sqrt()
        state["exp_avg"] = (sum(momenta) / len(momenta)).clamp(-bound, bound)
        p.mul_(1 - lr * decay if kind is AdamW else 1)
        unbiased = state["exp_avg"] / (1 - beta1 ** (step + 1))
        p.sub_(lr * unbiased / (frozen.sqrt() + group["eps"]))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def spread(monkeypatch: pytest.MonkeyPatch, per_host: int = 1) -> None:
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // per_host))


def lose_nothing(monkeypatch: pytest.MonkeyPatch, method: Compressor) -> None:
    """Let messages of a method's class hold the numbers themselves."""
    for name in ("nbytes", "encode", "encode_gradients", "decode", "add", "keep"):
        monkeypatch.setattr(type(method), name, getattr(ExactSigns, name))


def spoil_branch(accelerator: Accelerator, model: nn.Module) -> None:
    """Run a backward with one gradient of one rank that is not a number; all others are finite."""
    factor = float("nan") if accelerator.process_index == 1 else 1.0
    handle = model.branch.weight.register_hook(lambda gradient: factor * gradient)
    tokens, _ = batch(9, 0)
    accelerator.backward(model(tokens, branch=True))
    handle.remove()


def check_other_optimizers(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that ``prepare`` refuses all but plain Adam and AdamW."""
    for kind, options in ((SGD, {"lr": 0.1}), (AdamW, {"amsgrad": True}), (Adam, {"fused": True})):
        with pytest.raises(ConfigError, match="expected (torch.optim.Adam or AdamW|Adam)"):
            accelerator.prepare(model, kind(model.parameters(), **options))
