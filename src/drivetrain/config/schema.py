"""The core's own knobs, for every run under every strategy."""

from dataclasses import dataclass
from typing import Literal

from drivetrain.config.option import mapping, option, section

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
