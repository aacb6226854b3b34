"""The methods of a run for its slow links: named by the configuration, or chosen by a rule.

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
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from drivetrain.collectives import Route, chunk_bounds, sent_bytes
from drivetrain.collectives.volume import FlatSlice, ParameterRow, Sent, SlicesByRank
from drivetrain.compression.compressor import Compressor, Fidelity
from drivetrain.config.outline import EXACT, FarLinks
from drivetrain.config.resolve import checked_options
from drivetrain.config.schema import LinksConfig
from drivetrain.errors import ConfigError
from drivetrain.registry import compressors
from drivetrain.runtime.mesh import Axis

if TYPE_CHECKING:
    import torch


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
    dtype: "torch.dtype"

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
        fidelity: of the method, for this use.
        time: to encode and decode.
        link: between hosts.
        use: of the tensors.
    """

    name: str
    method: Compressor[Any] | None
    fidelity: Fidelity
    time: EncodingTime
    link: SlowLink
    use: LinkUse

    def pays_for(self, tensor: CrossingTensor) -> bool:
        """Return whether the link saves more time on a tensor than the method takes."""
        saved = self._exact(tensor) - self._sent(tensor)
        return saved / self.link.bytes_per_s > self._seconds(tensor)

    def approximated(self, slices: SlicesByRank) -> SlicesByRank:
        """Leave the parameters out for which the method does not pay: they go as they are."""
        return [[self._left(flat_slice) for flat_slice in part] for part in slices]

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

    def _left(self, flat_slice: FlatSlice) -> FlatSlice:
        spans = tuple(
            span
            for span in flat_slice.spans
            if span.is_matrix
            and self.pays_for(
                CrossingTensor(span.numel // span.columns, span.columns, flat_slice.dtype)
            )
        )
        return FlatSlice(flat_slice.numel, flat_slice.dtype, spans)

    def _seconds(self, tensor: CrossingTensor) -> float:
        return self.time.of(tensor.numel / self.link.per_host)

    def _exact(self, tensor: CrossingTensor) -> int:
        """Return the bytes of an exact tensor, sent by a host."""
        far, pieces = crossing_pieces(tensor, self.link.hosts, self.link.per_host)
        lengths = [sum(flat_slice.nbytes for flat_slice in part) for part in pieces]
        sums = self.use.name == "gradients"
        sent = sent_bytes("reduce_scatter", lengths, far.rank) if sums else 0
        if self.use.everywhere or not sums:
            sent += sent_bytes("all_gather", lengths, far.rank)
        return sent * self.link.per_host

    def _sent(self, tensor: CrossingTensor) -> int:
        """Return the bytes of an encoded tensor, sent by a host."""
        far, pieces = crossing_pieces(tensor, self.link.hosts, self.link.per_host)
        if self.method is None or not self.method.approximates(pieces):
            return self._exact(tensor)
        if self.use.name == "gradients":
            sent = self.method.sent(Route(far), pieces, everywhere=self.use.everywhere)
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
    order = list(Fidelity)
    found.sort(key=lambda each: (order.index(each.candidate.fidelity), -each.link_s))
    hiding = [each for each in (usual, *found) if each.hides]
    best = min((usual, *found), key=lambda each: each.seconds_in_sight)
    return (hiding[0] if hiding else best), [usual, *others]


def permitted(
    methods: Mapping[str, Compressor[Any]], use: str, allow: Fidelity
) -> dict[str, Compressor[Any]]:
    """Return the methods that can send such tensors, and that the user permits."""
    return {
        name: method
        for name, method in methods.items()
        # The attribute that says whether a method can has the name of the use.
        if getattr(method, use) and method.fidelity_of(use).within(allow)
    }


def crossing_pieces(
    tensor: CrossingTensor, hosts: int, per_host: int = 1
) -> tuple[Axis, SlicesByRank]:
    """Return the ranks at the first place of each host, and their pieces of a tensor."""
    ranks = tuple(range(hosts))
    far = Axis(name="far", size=hosts, rank=0, ranks=ranks, hosts=tuple(map(str, ranks)))
    row = ParameterRow("", (tensor.rows, tensor.columns), 0, 0)
    whole = FlatSlice.of(tensor.numel, tensor.dtype, [row])
    share = whole.cut(*chunk_bounds(tensor.numel, per_host)[0])
    return far, [[share.cut(*bounds)] for bounds in chunk_bounds(share.numel, hosts)]


# --- the methods of a run, from the configuration ---


AUTO = "auto"
"""The word for a method that ``drivetrain.compression.automatic`` chooses."""

USES = ("gradients", "parameters")
"""The keys that name a method, in the order of ``LinkMethods.names``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomaticLinks:
    """The choice that a configuration leaves open, and its limits.

    Attributes:
        uses: the keys that say auto.
        allow: how far training may be from exact training, at most.
        mbit_per_s: the declared rate of the link; 0: it is measured.
        backward_s: declared seconds of a backward; 0: the first steps tell them.
        methods: all that are installed, with their options.
        figures: of the link and of the methods; None before they are measured.
    """

    uses: tuple[str, ...]
    allow: Fidelity
    mbit_per_s: float
    backward_s: float
    methods: Mapping[str, Compressor[Any]]
    figures: LinkFigures | None = None


@dataclass(frozen=True, slots=True)
class LinkMethods(FarLinks):
    """The methods between hosts, and the bytes that they send.

    Attributes:
        auto: what is still to be chosen; until then, it is exact.
        paying: chosen methods by use: these leave tensors exact for which they do not pay.
        undoable: whether steps may be skipped; then sums keep their state of before a step, too.
        awaited: the uses whose methods are chosen after the first steps: ranks are connected as
            any method needs it, before the choice and after it.
    """

    gradients: Compressor[Any] | None = None
    parameters: Compressor[Any] | None = None
    auto: AutomaticLinks | None = None
    paying: Mapping[str, MethodOnLink] = field(default_factory=dict)
    undoable: bool = False
    awaited: tuple[str, ...] = ()

    @classmethod
    def configured(cls, config: LinksConfig, *, undoable: bool = False) -> "LinkMethods":
        """Return the methods that a configuration names.

        Args:
            config: names them.
            undoable: whether steps may be skipped.

        Raises:
            ConfigError: a method is not installed, cannot do what it is named for, or does not
                know an option.
        """
        far = config.far
        names = {use: getattr(far, use) for use in USES}
        kinds = {
            use: compressors().load(name)
            for use, name in names.items()
            if name not in (EXACT, AUTO)
        }
        for use, kind in kinds.items():
            _check_use(use, names[use], kind)
        open_uses = tuple(use for use in USES if names[use] == AUTO)
        installed = compressors().names if open_uses else ()
        able = {name: compressors().load(name) for name in installed}
        if far.options:
            _check_options(far.options, {**able, **kinds}, far.gradients, far.parameters)
        made = {use: kind(_options_for(kind, far.options)) for use, kind in kinds.items()}
        auto = None
        if open_uses:
            auto = AutomaticLinks(
                uses=open_uses,
                allow=Fidelity(config.allow),
                mbit_per_s=config.mbit_per_s,
                backward_s=config.backward_s,
                methods={
                    name: kind(_options_for(kind, far.options)) for name, kind in able.items()
                },
            )
        return cls(
            made.get("gradients"),
            made.get("parameters"),
            far.warmup_steps,
            (far.gradients, far.parameters),
            far.activations,
            auto,
            undoable=undoable,
        )

    def awaiting(self, uses: Sequence[str], figures: LinkFigures) -> "LinkMethods":
        """Return the same methods; those for some uses are chosen after the first steps."""
        assert self.auto is not None
        auto = replace(self.auto, figures=figures)
        return replace(self, auto=auto, awaited=tuple(uses))

    def decided(
        self, chosen: Mapping[str, MethodOnLink], uses: Sequence[str] = USES
    ) -> "LinkMethods":
        """Return the chosen methods in place of ``auto``.

        Args:
            chosen: by use; a use without a method is exact.
            uses: that are decided; the others stay as they are.
        """
        assert self.auto is not None
        taken = [use for use in uses if self.name_for(use) == AUTO]
        left = tuple(use for use in self.auto.uses if use not in taken)
        names = {use: EXACT if use in taken else self.name_for(use) for use in USES}
        names |= {use: each.name for use, each in chosen.items()}
        methods = {**self._methods, **{use: each.method for use, each in chosen.items()}}
        return replace(
            self,
            gradients=methods["gradients"],
            parameters=methods["parameters"],
            names=(names["gradients"], names["parameters"]),
            auto=replace(self.auto, uses=left) if left else None,
            paying={**self.paying, **chosen},
        )

    def is_open(self, use: str) -> bool:
        """Whether a method is still to be chosen."""
        return self.auto is not None and use in self.auto.uses

    def approximated(self, use: str, slices: SlicesByRank) -> SlicesByRank:
        """Return tensors without the parameters that stay exact, for which a choice does not pay.

        Args:
            use: ``gradients`` or ``parameters``.
            slices: of each rank of the axis between hosts.
        """
        return self.paying[use].approximated(slices) if use in self.paying else slices

    @property
    def active(self) -> bool:
        """Whether anything is approximate."""
        return self.in_channels or self.rounds_activations

    @property
    def in_channels(self) -> bool:
        """Whether sums of gradients or gathers of parameters are approximate."""
        return self.gradients is not None or self.parameters is not None

    @property
    def in_levels(self) -> bool:
        """Whether ranks are connected in levels of hosts: a method is in use, or may come."""
        return self.in_channels or bool(self.awaited)

    @property
    def fidelity(self) -> Fidelity:
        """How far training may be from exact training, at most."""
        used = [each.fidelity_of(use) for use, each in self._methods.items() if each is not None]
        used += [Fidelity.ROUNDING] if self.rounds_activations else []
        return max(used, key=list(Fidelity).index, default=Fidelity.EXACT)

    @property
    def approximates_parameters(self) -> bool:
        """Whether gathered values of parameters may differ from the values of their owners."""
        return self.parameters is not None

    @property
    def owns_apart(self) -> bool:
        """Whether owners keep values apart from gathered ones, which are approximate or may be."""
        return self.parameters is not None or "parameters" in self.awaited

    def describe(self, channels: frozenset[str] = frozenset()) -> str:
        """Return a line for the log: each use, its method and how honest the method is.

        Args:
            channels: of the strategy: a method may be more honest about updates than about values.
        """
        said = []
        for use, method in self._methods.items():
            sent = "updates" if use == "parameters" and "updates" in channels else use
            note = "" if method is None else f" ({method.fidelity_of(sent)})"
            said.append(f"{use} {self.name_for(use)}{note}")
        if self.rounds_activations:
            said.append(f"activations {self.activations} ({Fidelity.ROUNDING})")
        elif "activations" in channels:
            said.append(f"activations {EXACT}")
        limit = f", {self.auto.allow} at most, still to be chosen" if self.auto else ""
        warm = f", after {self.warmup} exact steps" if self.warmup and self.gradients else ""
        return f"between hosts: {', '.join(said)}{limit}{warm}"

    def note(self, channels: frozenset[str]) -> str:
        """Return the same line for the end of a title; "" if all is exact."""
        return f"; {self.describe(channels)}" if self.active or self.auto else ""

    def facts(self) -> list[str]:
        """Return a line for each choice, to be compared between ranks."""
        methods = self._methods
        options = [
            f"links.far.options of {use}: {method.config}"
            for use, method in methods.items()
            if method is not None
        ]
        names = [f"links.far.{use}: {self.name_for(use)}" for use in (*methods, "activations")]
        return [*names, f"links.far.warmup_steps: {self.warmup}", *options]

    # --- bytes between hosts; None where nothing is approximate ---

    def reduced(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> Sent | None:
        """Return the bytes that a rank sends in one sum of gradients."""
        slices = self.approximated("gradients", slices)
        if self.gradients is None or not self.gradients.approximates(slices):
            return None
        return self.gradients.sent(Route(far), slices, everywhere=everywhere)

    def held(self, far: Axis, slices: SlicesByRank, *, everywhere: bool) -> int:
        """Return the bytes that a rank keeps from one sum to the next."""
        slices = self.approximated("gradients", slices)
        if self.gradients is None or not self.gradients.approximates(slices):
            return 0
        held = self.gradients.held(far, slices, everywhere=everywhere)
        return 2 * held if self.undoable else held

    def gathered(self, far: Axis, slices: SlicesByRank) -> Sent | None:
        """Return the bytes that a rank sends in one gather of parameters."""
        slices = self.approximated("parameters", slices)
        if self.parameters is None or not self.parameters.approximates(slices):
            return None
        return self.parameters.sent_gathering(far, slices)


def _check_use(use: str, name: str, kind: type[Compressor[Any]]) -> None:
    if not _can_send(kind, use):
        able = [each for each in compressors().names if _can_send(compressors().load(each), use)]
        raise ConfigError(
            f"links.far.{use}: expected a method that can send {use}, found {name!r}; name one of "
            f"{', '.join([EXACT, *able])}"
        )


def _can_send(kind: type[Compressor[Any]], use: str) -> bool:
    return kind.gradients if use == "gradients" else kind.parameters or kind.updates


def _check_options(
    given: Mapping[str, Any], kinds: Mapping[str, type[Compressor[Any]]], *names: str
) -> None:
    known = {field.name for kind in kinds.values() for field in fields(kind.Config)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(
            f"links.far.options: expected options of {' and '.join(dict.fromkeys(names))}, found "
            f"{unknown}; they have {', '.join(sorted(known)) or 'none'}"
        )


def _options_for(kind: type[Compressor[Any]], given: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind.Config)}
    own = {key: value for key, value in given.items() if key in names}
    return checked_options(kind.Config, own, "links.far.options")
