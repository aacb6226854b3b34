"""The rule that chooses a method for a slow link, by the times of the link and the compute.

A method costs the time to encode and decode, and saves the time of bytes that are not sent. For a
tensor the method pays if ``saved bytes / rate of the link > time to encode and decode``; every
other tensor stays exact. Of the permitted methods the rule takes the least approximate one whose
traffic still hides behind compute, and if none hides, the one with the least time in sight::

    time in sight = max(0, bytes / rate - compute to hide behind) + time to encode and decode

Exact traffic is one of the candidates, the first one: most links need no method (Agarwal et al.,
"On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022). A choice for
each tensor by a model of time is that of Wang et al., "Hi-Speed DNN Training with Espresso",
EuroSys 2023, which searches over more choices. The rule is a function of its arguments alone: ranks
with equal facts choose alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.collectives import chunk_bounds, sent_bytes
from drivetrain.collectives.stretch import ParameterRow, Stretch, StretchParts
from drivetrain.links.compressor import Compressor, Honesty
from drivetrain.runtime.mesh import Axis


@dataclass(frozen=True, slots=True)
class EncodingTime:
    """The time that a rank takes to encode and decode one tensor, as a line over its size.

    Attributes:
        fixed_s: seconds, however small the tensor is.
        per_number_s: further seconds for each number.
    """

    fixed_s: float
    per_number_s: float

    def of(self, numel: float) -> float:
        """Return the seconds for so many numbers."""
        return self.fixed_s + self.per_number_s * numel


NO_TIME = EncodingTime(0.0, 0.0)
"""The time of tensors that are sent as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """The hosts of a run and the link between them.

    Attributes:
        bytes_per_s: that a host sends to another host.
        hosts: how many.
        per_host: ranks on each of them.
    """

    bytes_per_s: float
    hosts: int
    per_host: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """The figures of a link and of the methods, measured or declared: equal on all ranks.

    Attributes:
        link: between the hosts.
        source: of the link's rate, in words.
        times: to encode and decode, by method.
    """

    link: SlowLink
    source: str
    times: Mapping[str, EncodingTime]


@dataclass(frozen=True, slots=True)
class LinkUse:
    """The tensors that cross, and the compute behind which they do.

    Attributes:
        name: ``gradients``, ``parameters`` (their values) or ``updates`` (of parameters).
        everywhere: whether all ranks get the sums of gradients, not their owners alone.
        hidden_s: seconds of compute beside the traffic.
    """

    name: str
    everywhere: bool
    hidden_s: float

    @property
    def beside_compute(self) -> bool:
        """Whether the traffic may hide behind compute: updates come when a step is over."""
        return self.name != "updates"


@dataclass(frozen=True, slots=True)
class CrossingTensor:
    """A tensor that crosses: its rows, its columns and its dtype."""

    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class MethodOnLink:
    """A method on a link, for one use.

    Attributes:
        name: of the method.
        method: with its options; None: all is sent as it is.
        honesty: of the method, for this use.
        time: to encode and decode.
        link: between hosts.
        use: of the tensors.
    """

    name: str
    method: Compressor[Any] | None
    honesty: Honesty
    time: EncodingTime
    link: SlowLink
    use: LinkUse

    def pays_for(self, tensor: CrossingTensor) -> bool:
        """Return whether the link saves more time on a tensor than the method takes."""
        saved = self._exact(tensor) - self._sent(tensor)
        return saved / self.link.bytes_per_s > self._seconds(tensor)

    def approximated(self, stretches: StretchParts) -> StretchParts:
        """Leave the parameters out for which the method does not pay: they go as they are."""
        return [[self._left(stretch) for stretch in part] for part in stretches]

    def outlook(self, tensors: Sequence[CrossingTensor]) -> "Outlook":
        """Return the times of a step with the method."""
        paying = [each for each in tensors if self.method is not None and self.pays_for(each)]
        saved = sum(self._exact(each) - self._sent(each) for each in paying)
        return Outlook(
            self,
            link_s=(sum(map(self._exact, tensors)) - saved) / self.link.bytes_per_s,
            work_s=sum(map(self._seconds, paying)),
            tensors=len(paying),
            numel=sum(each.numel for each in paying),
        )

    def _left(self, stretch: Stretch) -> Stretch:
        spans = tuple(
            span
            for span in stretch.spans
            if span.is_matrix
            and self.pays_for(
                CrossingTensor(span.numel // span.columns, span.columns, stretch.dtype)
            )
        )
        return Stretch(stretch.numel, stretch.dtype, spans)

    def _seconds(self, tensor: CrossingTensor) -> float:
        return self.time.of(tensor.numel / self.link.per_host)

    def _exact(self, tensor: CrossingTensor) -> int:
        """Return the bytes of an exact tensor, sent by a host."""
        far, pieces = _pieces(tensor, self.link)
        lengths = [sum(stretch.nbytes for stretch in part) for part in pieces]
        sums = self.use.name == "gradients"
        sent = sent_bytes("reduce_scatter", lengths, far.rank) if sums else 0
        if self.use.everywhere or not sums:
            sent += sent_bytes("all_gather", lengths, far.rank)
        return sent * self.link.per_host

    def _sent(self, tensor: CrossingTensor) -> int:
        """Return the bytes of an encoded tensor, sent by a host."""
        far, pieces = _pieces(tensor, self.link)
        if self.method is None or not self.method.approximates(pieces):
            return self._exact(tensor)
        if self.use.name == "gradients":
            sent = self.method.sent(far, pieces, everywhere=self.use.everywhere)
        else:
            sent = self.method.sent_gathering(far, pieces)
        return sent.total() * self.link.per_host


@dataclass(frozen=True, slots=True)
class Outlook:
    """The times of a step with a method.

    Attributes:
        candidate: the method.
        link_s: seconds of the link.
        work_s: seconds to encode and decode.
        tensors: how many the method approximates.
        numel: their elements.
    """

    candidate: MethodOnLink
    link_s: float
    work_s: float
    tensors: int
    numel: int

    @property
    def hides(self) -> bool:
        """Whether the traffic takes no longer than the compute beside it."""
        return self.link_s <= self.candidate.use.hidden_s

    @property
    def seconds_in_sight(self) -> float:
        """Seconds that the traffic adds to a step."""
        return max(0.0, self.link_s - self.candidate.use.hidden_s) + self.work_s

    def __str__(self) -> str:
        work = f" + {self.work_s:.3g} s of encoding" if self.tensors else ""
        return f"{self.candidate.name} {self.link_s:.3g} s{work}"


def choose(
    exact: MethodOnLink, candidates: Sequence[MethodOnLink], tensors: Sequence[CrossingTensor]
) -> tuple[Outlook, list[Outlook]]:
    """Return the chosen method, and all outlooks, that of exact traffic first.

    Args:
        exact: sends all as it is.
        candidates: the methods that the user permits and the strategy can take.
        tensors: that cross in a step.
    """
    usual = exact.outlook(tensors)
    others = [each.outlook(tensors) for each in candidates]
    found = [each for each in others if each.seconds_in_sight < usual.seconds_in_sight]
    # Within one class, more bytes say more of the tensor.
    order = list(Honesty)
    found.sort(key=lambda each: (order.index(each.candidate.honesty), -each.link_s))
    hiding = [each for each in (usual, *found) if each.hides]
    best = min((usual, *found), key=lambda each: each.seconds_in_sight)
    return (hiding[0] if hiding else best), [usual, *others]


def permitted(
    methods: Mapping[str, Compressor[Any]], use: str, allow: Honesty
) -> dict[str, Compressor[Any]]:
    """Return the methods that can send such tensors, and that the user permits."""
    return {
        name: method
        for name, method in methods.items()
        # The attribute that says whether a method can has the name of the use.
        if getattr(method, use) and method.honesty_of(use).within(allow)
    }


def _pieces(tensor: CrossingTensor, link: SlowLink) -> tuple[Axis, StretchParts]:
    """Return the ranks at the first place of each host, and their pieces of a tensor."""
    hosts = tuple(range(link.hosts))
    far = Axis(name="far", size=link.hosts, rank=0, ranks=hosts, hosts=tuple(map(str, hosts)))
    row = ParameterRow("", (tensor.rows, tensor.columns), 0, 0)
    whole = Stretch.of(tensor.numel, tensor.dtype, [row])
    share = whole.cut(*chunk_bounds(tensor.numel, link.per_host)[0])
    return far, [[share.cut(*bounds)] for bounds in chunk_bounds(share.numel, link.hosts)]
