"""The strategy ``ddp``: replicas that average gradients during backward (Li et al., VLDB 2020)."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from drivetrain.collectives import Communicator
from drivetrain.cost import Cost, ModelSpec
from drivetrain.errors import ConfigError
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.kept import take_kept
from drivetrain.links.linked import hosts_apart, route_linked
from drivetrain.links.one_bit_adam import FrozenAdam, check_momentum, frozen_adam, refuse_clipping
from drivetrain.paper.contract import Planning
from drivetrain.paper.data_parallel import DataParallelPlanning, Sharing
from drivetrain.paper.run import PaperRun
from drivetrain.parts.buckets import MIB, Bucket
from drivetrain.parts.naming import named_parameters
from drivetrain.replicated import ReplicatedStrategy
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.shards import Reader, Shard
from drivetrain.strategy import Form, Prepared, Run
from drivetrain_ddp.compression import CommunicationHook, Finish
from drivetrain_ddp.config import DdpConfig
from drivetrain_ddp.reducer import BucketReducer


class Ddp(ReplicatedStrategy[DdpConfig]):
    """Data parallelism over the mesh axis ``dp``; one object per prepared model."""

    summary: ClassVar[str] = "every rank holds the whole model, and gradients are averaged"
    Config: ClassVar[type] = DdpConfig

    def __init__(self, config: DdpConfig, run: Run) -> None:
        super().__init__(config, run)
        far = hosts_apart(run.mesh, "dp", run.world, run.links) is not None
        self._adam = frozen_adam("ddp", config.exchange, run.links, far=far)
        self._hook = MomentumHook(self._adam) if self._adam else config.compression(run.precision)
        self.summing = [self.ranks]
        if self._adam:
            self.closing.callback(self._adam.close)

    @classmethod
    def check_options(cls, config: DdpConfig, precision: Precision) -> None:
        """Refuse masters, which every rank would hold whole, and two compressions."""
        precision.refuse(
            "ddp",
            "param",
            "master",
            instead="convert the model itself, or take a strategy that keeps master copies",
        )
        config.compression(precision)

    @classmethod
    def channels(cls, config: DdpConfig) -> frozenset[str]:
        """Return gradients: parameters are never sent after the start."""
        return frozenset({"gradients"})

    @classmethod
    def changes_links(cls, config: DdpConfig) -> bool:
        """Return True: every channel goes on with methods that are chosen later."""
        return True

    @classmethod
    def check_links(cls, config: DdpConfig, links: LinkMethods, precision: Precision) -> None:
        """Refuse parameters, and gradients that the option ``hook`` compresses, too."""
        super().check_links(config, links, precision)
        if links.gradients is not None and config.hook != "none":
            raise ConfigError(
                f"ddp: expected links.far.gradients or strategy.hook, found both: "
                f"{links.name_for('gradients')} and {config.hook}; leave one of them out"
            )
        if config.exchange == "momentum":
            check_momentum("ddp", links, precision)

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Prepared:
        """Lay out the buckets, and hook into backward."""
        parameters = [] if self.ranks.size == 1 else list(named_parameters(model).items())
        self._reducer = BucketReducer(parameters, self.ranks, self._hook, self.config, self.rounds)
        self.closing.callback(self._reducer.close)
        return super().prepare(model, optimizers)

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Save, load and step one more optimizer.

        Raises:
            ConfigError: momenta are exchanged, and the optimizer is no plain Adam or AdamW.
        """
        if self._adam:
            self._adam.check(optimizer)
        super().bind(optimizer)
        if self._adam:
            self._adam.add(optimizer)
        return optimizer

    def follow(self) -> None:
        """Follow changes of ``requires_grad``: the reducer's hooks are on the parameters."""
        self._reducer.follow()

    def begin(self) -> None:
        """Count down from all parameters of every bucket."""
        self._reducer.begin()

    def average(self) -> None:
        """Launch the buckets that are left, and wait for all sums."""
        self._reducer.end()

    def after_backward(self) -> None:
        """Average; buffers follow rank 0's if they are to."""
        if self.config.buffers == "broadcast":
            super().after_backward()
        else:
            self.average()

    def will_scale(self, factor: float) -> None:
        """Let momenta have the factor before they cross."""
        if self._adam:
            self._adam.factor = factor

    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        only: Collection[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the gradients to a norm of at most max_norm; all ranks have the same ones.

        Raises:
            UsageError: momenta are exchanged.
        """
        refuse_clipping(self._adam)
        return super().clip_grad_norm(max_norm, norm_type, only=only)

    def shards(self) -> Iterator[Shard]:
        """Yield the tensors that this rank saves, and what sums over links keep."""
        yield from super().shards()
        yield from self.ranks.kept()

    def load(self, reader: Reader) -> None:
        """Load everything on every rank, in place."""
        super().load(reader)
        self._reducer.open_channels()
        take_kept(self.summing, reader, self.run.links.name_for("gradients"))

    @classmethod
    def cost(cls, config: DdpConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the cost of a step with one synchronised backward.

        Buckets are laid out in reverse registration order; the observed order changes no more than
        the rounding of the ring's chunks. PowerSGD counts as started.
        """
        route = route_linked(run.mesh, "dp", run.world, run.links)
        trainable = [spec for spec in model.parameters if spec.trainable]
        names = [spec.name for spec in trainable]
        shapes = [spec.shape for spec in trainable]
        kinds = [(spec.dtype, None) for spec in trainable]
        order = range(len(trainable))[::-1]
        layouts = config.buckets(shapes, kinds, order) if route.axis.size > 1 else []
        hook, sent, gradients = config.compression(run.precision), Counter[tuple[str, str]](), 0
        for layout in layouts:
            sent += hook.sent(layout, names, route)
            gradients += layout.nbytes + hook.held(layout, names, route)
        if config.buffers == "broadcast":
            sent += route.broadcast(sum(spec.nbytes for spec in model.buffers))
        return cls.whole(model, sent, gradients if route.axis.size > 1 else None)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans of whole state, and of all-reduces beside the last backward."""
        return DataParallelPlanning(cls, _sharing)

    @classmethod
    def forms(cls, world: World) -> Sequence[Form]:
        """Return gradients as they are, and of low rank where hosts are connected by a network."""
        compressed = [Form({"hook": "powersgd"}, exact=False)] if world.spans_hosts else []
        return [Form(), *compressed]


def _sharing(config: DdpConfig, run: PaperRun) -> Sharing:
    if config.hook != "none":
        raise ConfigError(
            f"expected hook: none in a step on paper, found {config.hook}: the time of "
            "compression is not drawn; leave hook out"
        )
    return Sharing(bucket=round(config.bucket_mib * MIB))


# --- A bucket on the wire after the warm-up of 1-bit Adam ---


class MomentumHook(CommunicationHook):
    """Sums momenta over the ranks, for parameters whose variance is frozen; the others' gradients.

    Args:
        adam: has the momenta.
    """

    def __init__(self, adam: FrozenAdam) -> None:
        super().__init__()
        self._adam = adam

    @override
    def start(self, bucket: Bucket, missing: Sequence[int], communicator: Communicator) -> Finish:
        gradients = dict(zip(bucket.parameters, bucket.views, strict=True))
        turn_back = self._adam.exchange(gradients, communicator.size)
        wait = super().start(bucket, missing, communicator)

        def finish() -> None:
            wait()
            turn_back()

        return finish
