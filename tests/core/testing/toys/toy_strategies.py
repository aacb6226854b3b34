"""A minimal correct strategy, and strategies with one mistake each for the checks to find."""

from dataclasses import dataclass

import torch

from drivetrain.collectives import connect, sent_elements
from drivetrain.cost import Cost
from drivetrain.parts.naming import named_parameters, persistent_buffers
from drivetrain.parts.norms import clip_, global_norm
from drivetrain.shards import Part, Shard
from drivetrain.strategy import Prepared, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    """No knobs."""


class Toy(Strategy[ToyConfig]):
    """All-reduces each gradient by itself, after backward."""

    summary = "all-reduces each gradient after backward"
    Config = ToyConfig

    def __init__(self, config, run):
        super().__init__(config, run)
        world = run.world
        self.communicator = connect(run.mesh["dp"], run.traffic, world.device, world.timeout)
        self.syncing = True
        self.pending = False
        self.hooks = []

    @classmethod
    def axes(cls, config, world_size):
        return {"dp": world_size}

    def prepare(self, model, optimizers):
        self.model, self.optimizers = model, tuple(optimizers)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.hooks = [o.register_step_pre_hook(lambda *_: self.settle()) for o in optimizers]
        self.hooks += [p.register_post_accumulate_grad_hook(self.note) for p in self.trained]
        return Prepared(model, self.optimizers)

    def note(self, parameter):
        self.pending = True

    def backward(self, loss, **options):
        loss.backward(**options)
        self.pending = True
        if self.syncing:
            self.settle()

    def settle(self):
        if self.pending:
            self.pending = False
            self.synchronize(self.trained)

    def synchronize(self, parameters):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            wire = self.run.precision.reduce_dtype(parameter.dtype)
            flat = parameter.grad.to(wire).contiguous()
            self.communicator.all_reduce(flat, scale=1 / self.communicator.size).wait()
            parameter.grad.copy_(flat)

    def gradients(self, only=None):
        self.settle()
        return (p.grad for p in (self.trained if only is None else only) if p.grad is not None)

    def clip_grad_norm(self, max_norm, norm_type=2.0, *, only=None):
        self.settle()
        chosen = self.trained if only is None else only
        pieces = [p.grad for p in chosen if p.grad is not None]
        norm = global_norm(pieces, norm_type, device=self.run.world.device)
        clip_(pieces, norm, max_norm)
        return norm

    def tensors(self):
        names = {p: name for name, p in named_parameters(self.model).items()}
        for name, tensor in {
            **named_parameters(self.model),
            **persistent_buffers(self.model),
        }.items():
            yield name, "", tensor
        for index, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield names[parameter], f"{index}.{key}", value

    def shards(self):
        if self.communicator.rank == 0:
            for name, state, tensor in self.tensors():
                shape = tuple(tensor.shape)
                yield Shard(name, state, tensor.detach(), shape, Part.whole(shape))

    def load(self, reader):
        named = named_parameters(self.model)
        whole = {**named, **persistent_buffers(self.model)}
        with torch.no_grad():
            for name, state in list(reader.keys()):
                value = reader.read(name, state)
                if state:
                    index, _, key = state.partition(".")
                    self.optimizers[int(index)].state[named[name]][key] = value
                else:
                    whole[name].copy_(value)

    @classmethod
    def cost(cls, config, model, run):
        trained = [spec for spec in model.parameters if spec.trainable]
        size = run.mesh["dp"].size
        sent = sum(
            sent_elements("all_reduce", spec.numel, size=size)
            * run.precision.reduce_dtype(spec.dtype).itemsize
            for spec in trained
        )
        whole = sum(spec.nbytes for spec in trained)
        return Cost(
            held={
                "parameters": sum(spec.nbytes for spec in model.parameters),
                "gradients": whole,
                "optimizer": model.states * whole,
                "buffers": sum(spec.nbytes for spec in model.buffers),
            },
            sent={("dp", "all_reduce"): sent},
        )

    def accumulating(self, enabled=True):
        return _Syncing(self, not enabled)

    def close(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.communicator.close()


class _Syncing:
    def __init__(self, toy, value):
        self.toy, self.value, self.before = toy, value, toy.syncing

    def __enter__(self):
        self.toy.syncing = self.value

    def __exit__(self, *_):
        self.toy.syncing = self.before


class ForgetsToDivide(Toy):
    """Sums gradients instead of averaging them."""

    def synchronize(self, parameters):
        super().synchronize(parameters)
        for parameter in parameters:
            parameter.grad.mul_(self.communicator.size)


class ForgetsUnused(Toy):
    """Leaves out what has no gradient on this rank: ranks disagree on what to send."""

    def synchronize(self, parameters):
        super().synchronize([p for p in parameters if p.grad is not None])


class ForgetsToWait(Toy):
    """Sends gradients of every micro-batch, also inside an accumulation window."""

    def accumulating(self, enabled=True):
        return _Syncing(self, True)


class ClipsLocally(Toy):
    """Returns the norm of one parameter after another, not of the whole."""

    def clip_grad_norm(self, max_norm, norm_type=2.0, *, only=None):
        self.settle()
        norms = []
        for parameter in self.trained:
            pieces = [parameter.grad]
            norms.append(global_norm(pieces, norm_type))
            clip_(pieces, norms[-1], max_norm)
        return norms[-1]


class PromisesTooLittle(Toy):
    """Forgets half of the traffic and the optimizer's state in its cost."""

    @classmethod
    def cost(cls, config, model, run):
        honest = super().cost(config, model, run)
        sent = {key: nbytes // 2 for key, nbytes in honest.sent.items()}
        return Cost(held={**honest.held, "optimizer": 0}, sent=sent)


class SendsInSecret(Toy):
    """Sends every gradient once more, past the ledger."""

    def synchronize(self, parameters):
        super().synchronize(parameters)
        if self.communicator.size > 1:
            for parameter in parameters:
                copy = parameter.grad.clone()
                torch.distributed.all_reduce(copy, group=self.run.mesh["dp"].group)


class SavesTwice(Toy):
    """Every rank yields every shard."""

    def shards(self):
        for name, state, tensor in self.tensors():
            shape = tuple(tensor.shape)
            yield Shard(name, state, tensor.detach(), shape, Part.whole(shape))


class LosesMoments(Toy):
    """Loads parameters and forgets the optimizer's state."""

    def load(self, reader):
        super().load(reader)
        for optimizer in self.optimizers:
            optimizer.state.clear()


class NeverLetsGo(Toy):
    """Keeps its hooks when it is taken off."""

    def close(self):
        def divide(gradient):
            return gradient / 2

        for parameter in self.trained:
            parameter.register_hook(divide)
        super().close()
