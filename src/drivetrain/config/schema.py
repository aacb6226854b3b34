"""Knobs: how one is declared, and the core's own, for every run under every strategy.

Meaning, limits and question stand beside the dataclass field. The wizard's questions, the
validation, ``--set`` and the tables of the documentation are all made from these declarations, so a
knob is written down once. Also the dtypes of a precision.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from drivetrain.errors import ConfigError

# --- how a knob is declared ---

_KEY = "drivetrain.option"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The facts about one knob.

    Attributes:
        name: the field's name, which is the YAML key.
        type: the annotation: int, float, str, bool, ``Literal[...]``, a union of these, a mapping
            of them, a dataclass (a section), or ``NestedStrategy``.
        default: the value without any configuration.
        help: a sentence on the effect of the knob, with its unit.
        question: of the wizard; empty when the wizard leaves the knob at its default.
        minimum: smallest allowed number, or None.
        maximum: largest allowed number, or None.
    """

    name: str
    type: Any
    default: Any
    help: str
    question: str = ""
    minimum: float | None = None
    maximum: float | None = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a ``Literal``, in order; empty when the knob is free."""
        members = typing.get_args(self.type) if is_union(self.type) else (self.type,)
        return tuple(
            value
            for member in members
            if typing.get_origin(member) is Literal
            for value in typing.get_args(member)
        )

    @property
    def is_section(self) -> bool:
        """Whether the knob is a nested group of knobs."""
        return dataclasses.is_dataclass(self.type) and not self.is_strategy

    @property
    def is_strategy(self) -> bool:
        """Whether the knob chooses another strategy, whose own knobs stand beside its name."""
        return self.type is NestedStrategy


@dataclass(frozen=True, slots=True)
class NestedStrategy:
    """A strategy inside another strategy.

    Attributes:
        name: of the installed strategy; "" for the default one.
        options: its Config object; None for its defaults.
    """

    name: str = ""
    options: Any = None


def option(
    default: Any,
    *,
    help: str,  # noqa: A002 - the word users of argparse and click know
    question: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a knob as a dataclass field.

    Args:
        default: the value without any configuration; must be immutable.
        help: one sentence with the unit, shown by the wizard, ``config show`` and the docs.
        question: of the wizard; empty to leave the knob at its default.
        minimum: smallest allowed number.
        maximum: largest allowed number.

    Returns:
        A ``dataclasses.field``, typed Any so that ``x: int = option(1, ...)`` checks.
    """
    facts = {"help": help, "question": question, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata={_KEY: facts})


def section(cls: type, *, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a nested group of knobs: a field whose type is a dataclass of options."""
    return dataclasses.field(default_factory=cls, metadata={_KEY: {"help": help}})


def mapping(*, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a knob whose keys are the user's own: empty without any configuration."""
    return dataclasses.field(default_factory=dict, metadata={_KEY: {"help": help}})


def nested_strategy(name: str = "", *, help: str) -> Any:  # noqa: A002 - as in option()
    """Declare a knob of type ``NestedStrategy``: a name, or a name with that strategy's options.

    Args:
        name: the strategy without any configuration; "" for the default one.
        help: one sentence.
    """
    return dataclasses.field(default=NestedStrategy(name), metadata={_KEY: {"help": help}})


@lru_cache(maxsize=256)
def options_of(cls: type) -> Sequence[Option]:
    """Return the knobs that a configuration dataclass declares, in order.

    Raises:
        TypeError: when a field was not declared with ``option()`` or ``section()``.
    """
    hints = typing.get_type_hints(cls)
    knobs = []
    for field in dataclasses.fields(cls):
        if _KEY not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name} is not declared with option(); "
                "expected every field of a configuration to say its help text"
            )
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        knobs.append(
            Option(name=field.name, type=hints[field.name], default=default, **field.metadata[_KEY])
        )
    return tuple(knobs)


def is_union(annotation: Any) -> bool:
    """Whether an annotation is ``A | B`` or ``Union[A, B]``."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


# --- the core's knobs ---

if TYPE_CHECKING:
    import torch

LONGEST_WAIT_S = 31_536_000.0
"""A year: the clocks of some backends count no further than some centuries."""
MOST_HOSTS, MOST_RANKS_OF_A_HOST = 32_768, 4096
"""More than any machine has: a slip of the keyboard is refused before its ranks are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How many processes run, where, and how they find each other."""

    nproc_per_node: int | Literal["auto"] = option(
        "auto",
        help="Processes per host; auto: one per accelerator, or per CPU core without one.",
        minimum=1,
        maximum=MOST_RANKS_OF_A_HOST,
    )
    nnodes: int = option(1, help="Number of hosts.", minimum=1, maximum=MOST_HOSTS)
    min_nnodes: int | None = option(
        None,
        help="Fewest hosts with which the run goes on when others are lost; unset takes nnodes.",
        minimum=1,
    )
    node_rank: int = option(0, help="Index of this host, from 0.", minimum=0)
    rdzv_endpoint: str = option(
        "",
        help="HOST:PORT where the hosts meet; needed with nnodes > 1.",
    )
    max_restarts: int = option(
        0, help="How often all processes are started again after a failure.", minimum=0
    )
    resume: Literal["script", "auto", "never"] = option(
        "script",
        help="How accelerator.resume() goes on. auto: from the newest whole checkpoint, on other "
        "numbers of ranks with the same global batch where that is possible; script: the same, but "
        "accumulation stays as configured; never: a new run begins anew, its restarts go on.",
    )
    device: Literal["auto", "cpu"] = option(
        "auto",
        help="auto takes the accelerators of the host; cpu leaves them alone.",
    )
    threads_per_rank: int | Literal["auto"] = option(
        "auto",
        help="Threads of one process; auto divides the host's cores by its processes.",
        minimum=1,
    )
    keep_memory: bool = option(
        True,
        help="Whether a process on the CPU keeps the memory that it frees: faster steps, a larger "
        "resident size.",
    )
    timeout_s: float = option(
        600.0,
        help="Seconds that a collective may wait before the run fails.",
        minimum=0.1,
        maximum=LONGEST_WAIT_S,
    )
    start_timeout_s: float | None = option(
        None,
        help="Seconds that hosts and ranks may wait for each other at the start; unset takes "
        "timeout_s.",
        minimum=0.1,
        maximum=LONGEST_WAIT_S,
    )
    grace_s: float = option(
        30.0,
        help="Seconds that ranks have to save after SIGTERM, a scheduler's notice, before they are "
        "killed.",
        minimum=0,
        maximum=LONGEST_WAIT_S,
    )
    on_hang: Literal["report", "stop"] = option(
        "report",
        help="When ranks wait for another one for too long: report says who keeps whom waiting, "
        "and waits on; stop ends the run then.",
    )
    preflight: Literal["short", "full", "none"] = option(
        "short",
        help="Before a run over several hosts. short: all pairs connect, clocks and links are "
        "measured; full: every pair's bandwidth, too; none: versions and script alone are "
        "compared.",
    )
    straggler_every_s: float = option(
        60.0,
        help="Seconds over which the launcher compares the times of the ranks, to name a rank or "
        "a host that is slower than the others; 0 never compares.",
        minimum=0,
        maximum=LONGEST_WAIT_S,
    )
    straggler_margin: float = option(
        0.3,
        help="How much longer than the others' a rank's own work must take for the rank to be "
        "named; 0.3 is 30 %.",
        minimum=0.01,
        maximum=100,
    )
    log_dir: str = option("", help="Folder for one log file per process; empty for none.")

    @property
    def least_nnodes(self) -> int:
        """Fewest hosts with which the run goes on."""
        return self.nnodes if self.min_nnodes is None else self.min_nnodes

    @property
    def start_s(self) -> float:
        """Seconds that hosts and ranks may wait for each other at the start."""
        return self.timeout_s if self.start_timeout_s is None else self.start_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints beside the checkpoints of the script."""

    local: Literal["none", "memory"] = option(
        "none",
        help="memory: the launchers keep the newest state in the memory of their hosts, and each "
        "host a copy of another host's; a run that starts again goes on from there. Needs "
        "'drivetrain launch', and room for two checkpoints in /dev/shm.",
    )
    local_every: int = option(
        10, help="Optimizer steps from one checkpoint in memory to the next.", minimum=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How loaders are divided over the data-parallel axis."""

    split_batches: bool = option(
        False, help="True divides the loader's batch over the ranks instead of giving one to each."
    )
    dispatch_batches: bool | None = option(
        None, help="True lets rank 0 alone read and send; unset is true for iterable datasets only."
    )
    even_batches: bool = option(
        True, help="True repeats the first samples so that every rank has as many full batches."
    )
    use_seedable_sampler: bool = option(
        True, help="True derives the shuffle order from the seed and the epoch."
    )
    data_seed: int | None = option(
        None, help="Seed of the shuffle order; unset takes seed.", minimum=0
    )
    non_blocking: bool = option(False, help="True copies batches to the device asynchronously.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypesConfig:
    """The dtypes of tensors, where they differ from the dtypes of ``precision`` alone."""

    param: Literal["as_given", "bf16", "fp16"] = option(
        "as_given",
        help="Dtype in which forward reads fp32 parameters of two dims or more; vectors keep "
        "theirs. bf16 needs precision bf16 or fp8, fp16 needs fp16.",
    )
    reduce: Literal["as_given", "bf16", "fp16", "fp32"] = option(
        "as_given",
        help="Dtype in which gradients cross ranks; as_given sends the parameters' dtype.",
    )
    master: Literal["auto", "fp32", "none"] = option(
        "auto",
        help="Copy that the optimizer updates. auto: fp32 for what param converts; fp32: also for "
        "parameters given in bf16 or fp16; none: the parameter itself is updated.",
    )
    fp8: Literal["tensorwise", "tensorwise_gathered", "rowwise", "rowwise_with_gw_hp"] = option(
        "tensorwise",
        help="With precision fp8: a scale for each tensor (quickest), the same with weights that "
        "are gathered in fp8, a scale for each row, or for rows, with gradients of weights in bf16 "
        "(most exact).",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """Which activations are computed again in backward instead of being kept."""

    mode: Literal["none", "full", "selective"] = option(
        "none",
        help="full keeps a block's inputs; selective also the results of its projections; none "
        "recomputes nothing.",
    )
    blocks: str = option(
        "",
        help="Names of the recomputed modules, separated by commas, * for any text; empty takes "
        "the blocks that the model repeats.",
    )
    every: int = option(1, help="Recompute the first of each so many blocks.", minimum=1)
    keep: Literal["device", "cpu"] = option(
        "device", help="Where a block's inputs wait for backward; cpu is host memory."
    )
    partition: str = option(
        "",
        help="Mesh axis over which a block's inputs are split; its ranks must hold equal ones. "
        "Empty keeps them whole.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Which steps of a run are profiled."""

    steps: int | str = option(
        "",
        help="Steps to profile on all ranks: 5 takes five after two that warm up, 10:15 skips ten "
        "and takes the next five; empty profiles nothing.",
    )
    dir: str = option(
        "",
        help="Folder for traces and tables, on a disk that all hosts share; a number is added "
        "where it is in use. Empty: profile, in the project_dir if there is one.",
    )
    modules: bool = option(
        True,
        help="Whether the two steps after the profiled ones measure the floating point operations "
        "and the time of each module.",
    )
    peak_teraflops: float = option(
        0.0,
        help="Peak of a device in TFLOP/s, of which modules reach a share; 0 takes the published "
        "one, where the hardware catalog has the device.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FarConfig:
    """The methods for gradients, parameters and activations between hosts."""

    gradients: str = option(
        "exact",
        help="Method for gradients between hosts: exact, an installed one such as bf16 or int8, "
        "or auto, within links.allow.",
    )
    parameters: str = option(
        "exact",
        help="Method for parameters between hosts, where they are divided: exact, an installed "
        "one such as bf16 or int8, or auto, within links.allow.",
    )
    activations: Literal["exact", "bf16"] = option(
        "exact",
        help="Method for activations, and their gradients, between pipeline stages on different "
        "hosts: exact, or rounded to bf16.",
    )
    warmup_steps: int = option(
        0, help="Sums of gradients that are exact before the method begins.", minimum=0
    )
    options: dict[str, int | float | bool | str] = mapping(
        help="Options of the methods for gradients and parameters, such as block of int8."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksConfig:
    """The methods for slow links, by the place of the link."""

    far: FarConfig = section(
        FarConfig, help="Between hosts. One word, such as auto, is for gradients and parameters."
    )
    allow: Literal["exact", "rounding", "theory", "empirical"] = option(
        "exact",
        help="How far from exact training a method may be that auto chooses, at most; exact "
        "chooses none.",
    )
    mbit_per_s: float = option(
        0.0,
        help="Mbit/s that a host sends to another one, for the choice of auto; 0 takes the "
        "launcher's measurement, or measures at prepare().",
        minimum=0,
    )
    backward_s: float = option(
        0.0,
        help="Seconds of a backward, behind which traffic can hide, for the choice of auto at "
        "prepare(); 0 lets the first steps tell them, where ranks compute on processors.",
        minimum=0,
    )
    hardware: str = option(
        "",
        help="Description of the hardware, by name or as a file: each host.devices consecutive "
        "ranks count as one host, whatever their host names. Empty: host names decide.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, without its strategy section, which the strategy's own plugin declares."""

    precision: Literal["no", "bf16", "fp16", "fp8"] = option(
        "no",
        help="Compute precision: no (fp32), bf16, fp16 with a dynamic loss scale, or fp8: bf16 "
        "with the matrix products of blocks in fp8, by torchao.",
        question="Which precision?",
    )
    dtypes: DtypesConfig = section(
        DtypesConfig, help="Dtypes of parameters, gradients on the wire and master copies."
    )
    accumulation: int = option(
        1,
        help="Micro-batches per optimizer step.",
        minimum=1,
        maximum=100_000,
    )
    micro_batch: int | Literal["whole", "auto"] = option(
        "whole",
        help="Rows that accelerator.micro_batches() cuts a rank's batch into pieces of. auto: as "
        "many as fit into memory.",
        minimum=1,
    )
    step_scheduler_with: Literal["optimizer", "samples"] = option(
        "optimizer",
        help="optimizer: one scheduler step per optimizer step; samples: one per rank's batch.",
    )
    on_nonfinite: Literal["stop", "skip", "rollback", "ignore"] = option(
        "stop",
        help="What all ranks do at a loss or gradient that is infinite or NaN. stop: end the run; "
        "skip: leave the step out; rollback: load the newest finite checkpoint and go on with the "
        "next batches; ignore: nothing.",
    )
    report: bool | None = option(
        None,
        help="Whether the run records its figures and draws report.html in the folder run of its "
        "project_dir; unset is true where there is a project_dir.",
    )
    profile: ProfileConfig = section(
        ProfileConfig, help="Which steps are profiled, and where the profile goes."
    )
    memory_snapshot: str = option(
        "",
        help="Folder for torch's record of the allocations of each CUDA device that runs out of "
        "memory; empty records none.",
    )
    check_replicas_every: int = option(
        0,
        help="Compare the parameters of all ranks bit by bit after each so many optimizer steps; 0 "
        "never does.",
        minimum=0,
    )
    collect_garbage_every: int = option(
        0,
        help="Let Python look for garbage on all ranks after the same steps, each so many, and "
        "never in between; 0 leaves each rank to itself.",
        minimum=0,
    )
    seed: int | None = option(
        None,
        help="Seed of the shuffle order; unset takes that of the loader's own generator, or else "
        "of torch's, which set_seed() sets.",
        minimum=0,
    )
    recompute: RecomputeConfig = section(
        RecomputeConfig, help="Which activations are computed again in backward."
    )
    compile: Literal["none", "blocks"] = option(
        "none",
        help="blocks: torch.compile of the blocks that a model repeats, once for each class; their "
        "hooks and what strategies send stay outside.",
    )
    loss: Literal["whole", "chunked"] = option(
        "whole",
        help="chunked: causal language models of transformers compute their training loss some "
        "rows at a time, and their logits never exist whole.",
    )
    links: LinksConfig = section(
        LinksConfig, help="Approximations of what crosses a slow link; by default there are none."
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, help="Checkpoints in the memory of hosts, for a quick restart."
    )
    data: DataConfig = section(DataConfig, help="How loaders are divided over the ranks.")
    launch: LaunchConfig = section(LaunchConfig, help="How the processes are started.")

    @property
    def skips_steps(self) -> bool:
        """Whether a step with a gradient that is not finite is left out, and the run goes on."""
        return self.on_nonfinite == "skip"


PrecisionName: TypeAlias = Literal["no", "bf16", "fp16", "fp8"]
Recipe: TypeAlias = Literal["tensorwise", "tensorwise_gathered", "rowwise", "rowwise_with_gw_hp"]
Dtype: TypeAlias = "torch.dtype | str | None"
"""A dtype, its word, or None for none of them."""

WORDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""The words of dtypes, by torch's names."""

LOW_WORDS = ("bf16", "fp16")
"""Dtypes too coarse to add up gradients or updates in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The dtypes of one run in words, made with ``of`` or ``configured``, which check them.

    Attributes:
        name: the policy as configured.
        param: dtype in which forward reads fp32 parameters of two dims or more; None leaves each
            parameter in the dtype the user gave it.
        compute: dtype of matrix products inside forward; None computes in the parameters' dtype.
            With fp8 that of the products that are not in fp8.
        reduce: dtype in which gradients cross ranks; None sends each in its parameter's dtype.
        master: dtype of the copy the optimizer updates; None means the parameter is the master.
        master_of_given: whether parameters that the user gave in a low dtype get a master too.
        recipe: how numbers are scaled for products in fp8; None without any.
    """

    name: PrecisionName = "no"
    param: str | None = None
    compute: str | None = None
    reduce: str | None = None
    master: str | None = None
    master_of_given: bool = False
    recipe: Recipe | None = None

    @classmethod
    def of(
        cls,
        name: str,
        *,
        param: Dtype = None,
        reduce: Dtype = None,
        master: Dtype = "auto",
        recipe: Recipe = "tensorwise",
    ) -> Self:
        """Return the policy of a name, with other dtypes than the name alone gives.

        Args:
            name: no, bf16, fp16 or fp8, which is bf16 with products of blocks in fp8.
            param: dtype in which forward reads matrices: None, or the name's own.
            reduce: dtype of gradients on the wire: None, bf16, fp16 (with the name fp16) or fp32.
            master: ``auto`` keeps an fp32 master of parameters that ``param`` converts; ``fp32``
                also of parameters given in a low dtype; None keeps no master.
            recipe: of fp8; means nothing without it.

        Raises:
            ConfigError: an unknown name, or dtypes that do not fit together.
        """
        computes = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
        if name not in computes:
            raise ConfigError(f"expected a precision of no, bf16, fp16 or fp8, found {name!r}")
        compute = computes[name]
        read = None if param is None else dtype_word(param)
        sent = None if reduce is None else dtype_word(reduce)
        kept = None if master is None else dtype_word(master)
        _check(name, compute, read, sent, kept)
        return cls(
            name=name,  # type: ignore[arg-type]  # checked above
            param=read,
            compute=compute,
            reduce=sent,
            master=("fp32" if read is not None else None) if kept == "auto" else kept,
            master_of_given=kept == "fp32",
            recipe=recipe if name == "fp8" else None,
        )

    @classmethod
    def configured(cls, run: RunConfig) -> Self:
        """Return the policy of a configuration: its ``precision`` and its section ``dtypes``.

        Raises:
            ConfigError: dtypes that do not fit together.
        """
        dtypes = run.dtypes
        return cls.of(
            run.precision,
            param=None if dtypes.param == "as_given" else dtypes.param,
            reduce=None if dtypes.reduce == "as_given" else dtypes.reduce,
            master=None if dtypes.master == "none" else dtypes.master,
            recipe=dtypes.fp8,
        )

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients underflow without a loss scale."""
        return self.compute == "fp16"

    def refuse(self, strategy: str, *names: str, instead: str) -> None:
        """Raise when a dtype is set that a strategy does not honour.

        Args:
            strategy: its name.
            names: the dtypes without effect under the strategy: ``param``, ``reduce``, ``master``.
            instead: the way out.

        Raises:
            ConfigError: one of the names is set.
        """
        for name in names:
            word = getattr(self, name)
            if word is not None:
                raise ConfigError(
                    f"{strategy}: expected dtypes.{name} as the model is given, found "
                    f"{word} (precision {self}); {instead}"
                )

    def __str__(self) -> str:
        given = "as given"
        return (
            f"{self.name}: param {self.param or given}, compute {self.compute or given}, "
            f"reduce {self.reduce or given}, master {self.master or 'none'}"
            f"{f', fp8 {self.recipe}' if self.recipe else ''}"
        )


def dtype_word(dtype: "torch.dtype | str") -> str:
    """Return bf16, fp16 or fp32, and torch's name for other dtypes."""
    name = str(dtype).removeprefix("torch.")
    return WORDS.get(name, name)


def _check(
    name: str, compute: str | None, param: str | None, reduce: str | None, master: str | None
) -> None:
    """Refuse dtypes that do not fit together."""
    if param not in (None, *LOW_WORDS):
        raise ConfigError(
            f"dtypes.param: expected as_given, bf16 or fp16, found {param}; parameters that are "
            "given in fp32 stay so with as_given"
        )
    if param not in (None, compute):
        raise ConfigError(
            f"dtypes.param: {param} needs precision: {param}, found precision: {name}; set "
            f"precision: {param}, or dtypes.param: as_given"
        )
    if reduce not in (None, *WORDS.values()):
        raise ConfigError(f"dtypes.reduce: expected as_given, bf16, fp16 or fp32, found {reduce}")
    if reduce == "fp16" and name != "fp16":
        raise ConfigError(
            f"dtypes.reduce: fp16 needs precision: fp16, found precision: {name}; without a loss "
            "scale gradients underflow in fp16: set dtypes.reduce: bf16, or precision: fp16"
        )
    if master not in ("auto", "fp32", None):
        raise ConfigError(
            f"dtypes.master: expected auto, fp32 or none, found {master}; a master "
            "copy is there for fp32"
        )
    if master is None and param == "fp16":
        raise ConfigError(
            "dtypes.master: none cannot go with dtypes.param: fp16, whose updates underflow; set "
            "dtypes.master: fp32, or precision: bf16 with dtypes.param: bf16"
        )
