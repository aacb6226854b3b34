"""Strategies with one mistake each for the checks to find; without it each is ``plain``."""

import torch

from drivetrain.cost import Cost
from drivetrain.parallel.backward import clip_, global_norm
from drivetrain.saved_state import ReplicatedState
from drivetrain_plain.strategy import Plain


class ForgetsToDivide(Plain):
    """Sums gradients instead of averaging them."""

    def _mean(self, parameter):
        return super()._mean(parameter).mul_(self.ranks.size)


class ForgetsUnused(Plain):
    """Leaves out what has no gradient on this rank: ranks disagree on what to send."""

    def _mean(self, parameter):
        return None if parameter.grad is None else super()._mean(parameter)


class ForgetsToWait(Plain):
    """Sends gradients of every micro-batch, also inside an accumulation window."""

    def accumulating(self, enabled=True):
        return super().accumulating(False)

    def _mean(self, parameter):
        mean = parameter.grad.contiguous()
        self.ranks.all_reduce(mean, scale=1 / self.ranks.size).wait()
        return mean


class ClipsLocally(Plain):
    """Returns the norm of one parameter after another, not of the whole."""

    def bind(self, optimizer):
        self.gradients.clip = self._clip
        return super().bind(optimizer)

    def _clip(self, max_norm, norm_type=2.0, *, only=None):
        for gradient in self.gradients():
            norm = global_norm([gradient], norm_type)
            clip_([gradient], norm, max_norm)
        return norm


class PromisesTooLittle(Plain):
    """Forgets half of the traffic and the optimizer's state in its cost."""

    @classmethod
    def cost(cls, config, model, run):
        honest = super().cost(config, model, run)
        sent = {key: nbytes // 2 for key, nbytes in honest.sent.items()}
        return Cost(held={**honest.held, "optimizer": 0}, sent=sent)


class SendsInSecret(Plain):
    """Sends every gradient once more, past the ledger."""

    def _mean(self, parameter):
        copy = torch.zeros_like(parameter)
        torch.distributed.all_reduce(copy, group=self.run.mesh["dp"].group)
        return super()._mean(parameter)


class SavesTwice(Plain):
    """Every rank yields every shard."""

    def bind(self, optimizer):
        self.state = ReplicatedState(self.model)
        return super().bind(optimizer)


class LosesMoments(Plain):
    """Loads parameters and forgets the optimizer's state."""

    def bind(self, optimizer):
        load = self.state.load
        self.state.load = lambda reader: (load(reader), optimizer.state.clear())
        return super().bind(optimizer)


class NeverLetsGo(Plain):
    """Leaves a hook when it is taken off."""

    def close(self):
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
        super().close()
