"""Averages gradients in buckets, each by one all-reduce that runs while backward goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from drivetrain import Cost, ModelSpec, Run, UsageError, option
from drivetrain.collectives import Handle, sent_elements
from drivetrain.config.schema import Policy
from drivetrain.cost import TensorSpec
from drivetrain.hardware.sizes import MIB
from drivetrain.parallel.replicated import Bucket, BucketLayout, ReplicatedStrategy, plan_buckets
from drivetrain.simulator.contract import Sharing
from drivetrain.strategy import DataParallelPlanning, Planning


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatConfig:
    """The knobs of ``flat``: the wizard asks for those with a question."""

    mean: bool = option(
        True,
        help="True averages gradients over ranks, False sums them.",
        question="Average gradients over ranks?",
    )
    bucket_mib: float = option(1.0, help="MiB of gradients that are sent together", minimum=0.001)

    def layouts(self, specs: Sequence[TensorSpec]) -> list[BucketLayout]:
        """Cut parameters into buckets, in the order in which gradients usually come."""
        nbytes, backwards = int(self.bucket_mib * MIB), range(len(specs))[::-1]
        shapes, kinds = [spec.shape for spec in specs], [(spec.dtype, None) for spec in specs]
        return plan_buckets(shapes, kinds, backwards, bucket_bytes=nbytes, first_bytes=nbytes)


class Flat(ReplicatedStrategy[FlatConfig]):
    """Whole models; one object per prepared model."""

    summary: ClassVar[str] = "one all-reduce of each bucket of gradients (example plugin)"
    Config: ClassVar[type] = FlatConfig

    @classmethod
    def check_options(cls, config: FlatConfig, precision: Policy) -> None:
        """Refuse what is not honoured: nothing may be ignored silently."""
        precision.refuse("flat", "param", "reduce", "master", instead="leave it out")

    def follow(self) -> None:
        """Lay out the buckets again when other parameters are trained than before."""
        super().follow()
        trained = [p for p in self.parameters if p in self.hooked]
        names = [str(index) for index in range(len(trained))]
        specs = [TensorSpec.of(*pair) for pair in zip(names, trained, strict=True)]
        layouts = self.config.layouts(specs)
        if layouts != [bucket.layout for bucket in getattr(self, "_buckets", ())]:
            self._buckets = [
                Bucket(layout, [trained[i] for i in layout.members], names) for layout in layouts
            ]
            self._bucket_of = {p: i for i, b in enumerate(self._buckets) for p in b.parameters}

    def begin(self) -> None:
        """Wait for all parameters of every bucket."""
        self._missing = [set(bucket.parameters) for bucket in self._buckets]
        self._sent: list[Handle] = []

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are complete, in the same order on all ranks."""
        place = self._bucket_of[parameter]
        if place < len(self._sent):
            raise UsageError("a gradient came twice; use checkpoint(use_reentrant=False)")
        self._missing[place].discard(parameter)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        for place, parameter in enumerate(bucket.parameters):
            bucket.leave_kept(place)
            grad, view = parameter.grad, bucket.views[place]
            bucket.flags[place] = grad is not None
            if grad is None:
                view.zero_()
            elif grad is not view:  # autograd adds to the bucket itself from now on
                parameter.grad = view.copy_(grad)
        scale = 1 / self.ranks.size if self.config.mean else 1.0
        self._sent.append(self.ranks.all_reduce(bucket.flat, scale=scale, label="bucket"))

    def average(self) -> None:
        """Send the rest, and wait: a gradient that no rank has stays None."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, handle in zip(self._buckets, self._sent, strict=True):
            handle.wait()
            for place, flag in enumerate(bucket.flags.tolist()):
                if flag:
                    bucket.parameters[place].grad = bucket.views[place]

    @classmethod
    def cost(cls, config: FlatConfig, model: ModelSpec, run: Run) -> Cost:
        """Return the bytes of the formulas in the package's docstring."""
        size, buffers = run.mesh["dp"].size, sum(spec.nbytes for spec in model.buffers)
        trained = [spec for spec in model.parameters if spec.trainable]
        layouts = config.layouts(trained) if size > 1 else []
        sent = sum(
            sent_elements("all_reduce", layout.numel, size=size) * layout.dtype.itemsize
            for layout in layouts
        )
        broadcast = sent_elements("broadcast", buffers, size=size)
        held = sum(layout.nbytes for layout in layouts) or None  # gradients lie in the buckets
        return cls.whole(model, {("dp", "all_reduce"): sent, ("dp", "broadcast"): broadcast}, held)

    @classmethod
    def planning(cls) -> Planning:
        """Return plans of whole state, and of buckets beside the last backward."""
        return DataParallelPlanning(
            cls, lambda config, run: Sharing(bucket=round(config.bucket_mib * MIB))
        )
