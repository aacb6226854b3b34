"""``transformers.Trainer`` under any strategy: the Trainer keeps its loop, the strategy trains.

The Trainer talks to an Accelerator of Hugging Face; here it gets one of ours. A checkpoint holds,
beside the Trainer's own files, the folder ``drivetrain`` with the sharded state of an exact resume.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import TorchDynamoPlugin  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.utils.generic import ModelOutput

from drivetrain.accelerator import Accelerator
from drivetrain.communication import gather_rows
from drivetrain.compat.accelerator import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    Plugin,
    translated,
)
from drivetrain.data import PreparedLoader, skip_first_batches
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ProjectConfiguration,
)
from drivetrain.log import get_logger
from drivetrain.nested import recursively_apply
from drivetrain.runtime.gradient_state import GradientState

logger = get_logger(__name__)

# --- the token scores of TRL's trainers, made of a model's logits ---

# TRL gives a model another forward, which multiplies with the head's weight itself. Ranks of tensor
# and pipeline parallelism have a part of this weight, or none; the head's module knows how to work
# with it.

_SWITCH = "fused_lm_head"
"""Argument of TRL's forward that asks for scores in place of logits."""

_IGNORED = -100
"""Label of tokens without a score."""


@dataclass
class TokenScores(ModelOutput):
    """Scores of next tokens, under the names of TRL; each (batch, length - 1), 0 where ignored.

    Attributes:
        log_probs: log-probability of each label.
        entropy: of the distribution over the vocabulary.
        log_sum_sq_probs: logarithm of the sum of squared probabilities, without gradient.
        mean_logits: mean over the vocabulary, without gradient.
        is_top1: whether the label has the largest logit.
        label_mask: whether the label counts.
        aux_loss: of a mixture of experts, 0-d.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def score_by_modules(model: nn.Module) -> None:
    """Let a model that TRL has changed make its scores of the logits that its modules return."""
    for module in model.modules():
        forward = vars(module).get("forward")
        given = getattr(forward, "__func__", None)
        if given and _SWITCH in inspect.signature(given, follow_wrapped=False).parameters:
            temperature = inspect.getclosurevars(given).nonlocals.get("temperature", 1.0)
            module.forward = _scoring(forward, temperature)  # type: ignore[arg-type]


def _scoring(forward: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    @functools.wraps(forward)
    def score(
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return forward(*args, labels=labels, shift_labels=shift_labels, **kwargs)
        kwargs.pop("num_items_in_batch", None)  # of the model's own loss
        output = forward(*args, **kwargs)
        logits, targets = output.logits, shift_labels
        if labels is not None and targets is None:
            logits, targets = logits[:, :-1], labels[:, 1:]
        scores = scores_of(logits / temperature, targets)
        scores.aux_loss = getattr(output, "aux_loss", None)
        return scores

    return score


def scores_of(logits: Tensor, labels: Any) -> TokenScores:
    """Return the scores of labels.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length), int64; -100 is ignored.
    """
    counted = labels != _IGNORED
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = logits.log_softmax(-1)
    chosen = found.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    fixed = found.detach()
    scores = {
        "log_probs": chosen,
        "entropy": -(found.exp() * found).sum(-1),
        "log_sum_sq_probs": (2 * fixed).logsumexp(-1),
        "mean_logits": logits.detach().mean(-1),
        "is_top1": logits.detach().argmax(-1) == labels,
    }
    masked = {name: score.masked_fill(~counted, 0) for name, score in scores.items()}
    return TokenScores(**masked, label_mask=counted)


# --- training arguments in our terms: engine, loaders and micro-batches ---


def engine_of(args: Any) -> dict[str, Any]:
    """Return the strategy, and the further configuration, that training arguments choose.

    Arguments for DeepSpeed, FSDP and parallelism are translated as ``config import`` does; one line
    tells of each setting without counterpart.

    Returns:
        Arguments of the Accelerator; empty where the launch configuration chooses alone.

    Raises:
        UsageError: the arguments choose two engines, or a setting changes results.
        ConfigError: a setting is unknown, or contradicts another one.
    """
    compilation = {"compile": "blocks"} if args.torch_compile else {}
    plugins = engines_in(args)
    if not plugins:
        return {"config": compilation} if compilation else {}
    found = translated(plugins)
    for remark in found.remarks:
        logger.announce(f"training arguments: {remark}")
    if args.deepspeed:
        # Else transformers asks DeepSpeed for a model's parameters.
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    values = {**found.values, **compilation}
    return {"strategy": values.pop("strategy", None), "config": values or None}


def engines_in(args: Any) -> list[Plugin]:
    """Return the engines that training arguments choose, as plugin objects."""
    plugins: list[Plugin] = []
    if args.deepspeed:  # DeepSpeed's configuration, or the path of its file
        given = args.deepspeed
        config = given if isinstance(given, Mapping) else json.loads(Path(given).read_text("utf-8"))
        plugins.append(DeepSpeedPlugin(config))
    if args.fsdp_plugin_args:
        plugins.append(FullyShardedDataParallelPlugin(**args.fsdp_plugin_args))
    if args.parallelism_config:
        sizes = {k: v for k, v in vars(args.parallelism_config).items() if not k.startswith("_")}
        plugins.append(ParallelismConfig(**sizes))
    return plugins


def refuse_other_engines(args: Any, model: Any) -> None:
    """Refuse training arguments and models that a strategy cannot train with.

    Raises:
        UsageError: names the argument, and its counterpart.
    """
    backend = args.torch_compile_backend, args.torch_compile_mode
    if args.torch_compile and backend not in {("inductor", None), ("inductor", "default")}:
        raise UsageError(
            "expected torch_compile_backend='inductor' without a torch_compile_mode, found "
            f"{backend[0]!r} and {backend[1]!r}; leave them out, or pass "
            "Trainer(model=torch.compile(model))"
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"expected one GPU for each process, found {args.n_gpu} for one; start the script with "
            "'drivetrain launch'"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UsageError(
            f"expected a whole model, found one divided over {model.tp_size} ranks by "
            "from_pretrained; leave out tp_plan, and choose tp in the strategy"
        )
    if model is not None and any(hasattr(one, "ds_id") for one in model.parameters()):
        raise UsageError(
            "expected a whole model, found one that deepspeed.zero.Init has divided; make the "
            "model before TrainingArguments(deepspeed=...)"
        )
    if getattr(args, "sync_ref_model", False):
        raise UsageError(
            "expected sync_ref_model=False, found True: the callback would copy parameters that "
            "ranks may divide; keep the reference model fixed"
        )


def refuse_other_batches(args: Any, accelerator: Accelerator) -> None:
    """Refuse batches that would be cut outside of the loader, or become others on retries.

    Raises:
        UsageError: names the setting, and what has the same global batch.
    """
    instead = (
        "lower per_device_train_batch_size and raise gradient_accumulation_steps by the same "
        "factor: the global batch stays"
    )
    several = accelerator.num_processes > 1
    if args.auto_find_batch_size and several:
        raise UsageError(
            "expected auto_find_batch_size=False on several ranks, found True: a rank that runs "
            "out of memory alone leaves the others waiting, and another try would train with "
            f"another global batch; {instead}"
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance" and several:
        raise UsageError(
            "expected train_sampling_strategy='group_by_length' on several ranks, found "
            "'batch_rebalance', which deals batches out to ranks that loaders divide already"
        )
    if several and (args.bf16_full_eval or args.fp16_full_eval):
        raise UsageError(
            "expected bf16_full_eval=False and fp16_full_eval=False on several ranks, found True: "
            "weights that the strategy trains would change their dtype; take bf16=True"
        )
    if (found := accelerator.config.run.micro_batch) != "whole":
        raise UsageError(
            f"micro_batch: expected whole under a Trainer, found {found}: its loop computes whole "
            f"batches, and knows alone what its losses are means of; {instead}"
        )


def loader_options(args: Any) -> DataLoaderConfiguration:
    """Return the training arguments' options of loaders, as far as they differ from the default."""
    given, usual = args.accelerator_config, type(args.accelerator_config)()
    names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    options = {
        name: getattr(given, name)
        for name in (*names, "non_blocking")
        if getattr(given, name) != getattr(usual, name)
    }
    seed = args.seed if args.data_seed is None else args.data_seed
    return DataLoaderConfiguration(**options, data_seed=seed)


def accumulation_of(args: Any, configured: int) -> tuple[int, dict[str, Any]]:
    """Return the micro-batches per step, and the further options of accumulation.

    Args:
        args: the training arguments.
        configured: micro-batches per step in the launch configuration.

    Raises:
        UsageError: both say a number, and not the same.
    """
    more = dict(args.accelerator_config.gradient_accumulation_kwargs or {})
    given = {args.gradient_accumulation_steps, more.pop("num_steps", 1), configured}
    if len(given - {1}) > 1:
        raise UsageError(
            f"expected one number of micro-batches per step, found {sorted(given - {1})} in the "
            "training arguments and in accumulation of the launch configuration; keep one"
        )
    return max(given), more


def join(args: Any, accelerator: Accelerator) -> None:
    """Tell the training arguments about the other ranks, which they missed on the CPU.

    The state of Accelerate's own Accelerator is made, too: trainers and libraries ask it.
    """
    on_cpu = accelerator.device.type == "cpu"
    if args.distributed_state.num_processes != accelerator.num_processes:
        state = type(args.distributed_state)
        state._reset_state()
        args.distributed_state = state(cpu=on_cpu)
    AcceleratorState._reset_state()
    AcceleratorState(
        accelerator.mixed_precision,
        cpu=on_cpu,
        dynamo_plugin=TorchDynamoPlugin(),
        _from_accelerator=True,
    )


# --- the Trainer ---

STATE_FOLDER = "drivetrain"
"""Folder of the sharded state inside of a Trainer's checkpoint."""

OPTIMIZER_FILE = "optimizer.pt"
"""File of the optimizer in a checkpoint of the Trainer alone."""


class TrainerWindow(GradientState):
    """An accumulation window whose ends the Trainer announces.

    Attributes:
        plugin_kwargs: the Trainer's ``gradient_accumulation_kwargs``.
    """

    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})

    def _set_sync_gradients(self, sync: bool) -> None:
        self.sync_gradients = sync


class TrainerAccelerator(Accelerator):
    """The Accelerator with the further members that a Trainer reads.

    Attributes:
        accumulation: micro-batches per step in the configuration.
        window: the accumulation window.
        parallelism_config: None: the strategy lays out the ranks.
        stands_in: whether this rank evaluates a batch without any sample of its own.
    """

    parallelism_config = None
    stands_in = False

    def _assemble(self, project: ProjectConfiguration, log_with: Any) -> None:
        self.accumulation = self.gradient_state.num_steps
        self.gradient_state = self.window = TrainerWindow(1)  # the Trainer divides losses itself
        super()._assemble(project, log_with)

    @property
    def _models(self) -> list[nn.Module]:
        return [entry.model for entry in self._state.models]

    @property
    def cell_size(self) -> int:
        """Number of ranks that share a batch."""
        return self.num_processes // self.mesh["dp"].size

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """Divide one loader; checkpoints leave it out, since the Trainer counts batches itself."""
        loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._state.loaders.clear()
        return loader

    def gather(self, tensor: Any) -> Any:
        """Gather, also where ranks have other numbers of rows, as where an evaluation ends."""
        if self.stands_in:
            tensor = recursively_apply(lambda leaf: leaf.reshape(-1, *leaf.shape[1:])[:0], tensor)
        return gather_rows(tensor, "gather", group=self.mesh["dp"])


class StrategyTraining:
    """The methods of a Trainer that a strategy changes; mixed into a class of Trainer."""

    args: Any
    accelerator: TrainerAccelerator
    model: nn.Module
    lr_scheduler: Any
    save_model: Callable[..., None]
    gather_function: Callable[..., Any]
    _evaluated: int | None = None
    _part: float = 1.0
    """Samples of this rank in a batch of the evaluation, by the mean of all ranks."""
    _rows: int = 0
    """Rows of a sample in an evaluation, as two in batches of pairs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: Mapping[str, torch.Tensor] | None = None
        self.save_model = self._gathering(self.save_model)
        if self.accelerator.cell_size > 1:
            if self._generates:
                raise UsageError(
                    f"expected a strategy whose ranks have batches of their own for "
                    f"{type(self).__name__}, found tp or pp: it deals out what it generates by "
                    "rank; take zero3 or fsdp"
                )
            generates = getattr(self.args, "predict_with_generate", False)
            encodes = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
            stages = self.accelerator.mesh.get("pp")
            if generates and encodes and stages is not None and stages.size > 1:
                raise UsageError(
                    "expected predict_with_generate=False under pp for a model with an encoder, "
                    "found True: generate() calls the encoder alone, and the decoder without it, "
                    "where stages need the calls of a training; take tp, zero3 or fsdp"
                )
            score_by_modules(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator from the launch configuration and the training arguments.

        Raises:
            UsageError: the arguments choose an engine or a compilation of their own, retry with
                other batches, or accumulate otherwise than the launch configuration, which cuts
                no batches.
        """
        refuse_other_engines(self.args, self.model)
        self.accelerator = TrainerAccelerator(
            **engine_of(self.args),
            mixed_precision=None
            if self.args.mixed_precision == "no"
            else self.args.mixed_precision,
            cpu=self.args.use_cpu or None,
            dataloader_config=loader_options(self.args),
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    bucket_cap_mb=self.args.ddp_bucket_cap_mb,
                    broadcast_buffers=self.args.ddp_broadcast_buffers,
                )
            ],
        )
        refuse_other_batches(self.args, self.accelerator)
        steps, more = accumulation_of(self.args, self.accelerator.accumulation)
        self.args.gradient_accumulation_steps = steps
        self.accelerator.window.plugin_kwargs = more
        join(self.args, self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def get_tp_size(self) -> int:
        """Return the number of ranks that share a batch."""
        return self.accelerator.cell_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # The Trainer sums over all ranks and divides by those that share a batch. Our ``gather``
        # has counted these once already.
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if not isinstance(items, torch.Tensor):
            return items
        part = self._part if self.args.average_tokens_across_devices else 1.0
        return items * self.get_tp_size() * part

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's part of a batch's operations: the Trainer sums over all ranks."""
        return float(super().floating_point_ops(inputs) / self.get_tp_size())  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate each sample once, with a Seq2SeqTrainer, too."""
        self.gather_function = self._gather_rows
        if isinstance(dataloader, PreparedLoader):
            dataloader.fills_batches = self._generates
        self._rows = 0
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict, and keep how many samples the loss is a mean of."""
        one = self.accelerator.gradient_state.at_hand
        if one is not None and one.end_of_dataloader and one.rows and not one.loader.fills_batches:
            mine = torch.tensor(float(one.rows.real), device=self.accelerator.device)
            self._part = float(mine / self.accelerator.gather(mine).mean()) or 1.0
            self.accelerator.stands_in = not one.rows.real
        generates = getattr(self.args, "predict_with_generate", False)
        with self._generation() if generates else nullcontext():
            found = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self._part, self.accelerator.stands_in = 1.0, False
        self._evaluated = None
        if found[0] is not None and (rows := find_batch_size(inputs)):  # type: ignore[no-untyped-call]
            self._rows = self._rows or max(1, rows // self.args.eval_batch_size)
            self._evaluated = rows // self._rows
        return found

    @property
    def _generates(self) -> bool:
        """Whether this is a trainer of TRL that deals out what its model generates, by rank."""
        return hasattr(super(), "_generate_single_turn")

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL's trainers do that train on what their model says."""
        with self._generation():
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _generation(self) -> Iterator[None]:
        """Context in which ranks call the model as often as their own texts need."""
        if not self.accelerator._models:  # evaluated without a training: nothing is divided
            yield
            return
        training = self.model.training
        with self.accelerator.inference(self.model) as whole:
            whole.train(training)
            yield

    def _gather_rows(self, data: Any) -> Any:
        # What comes first after a step is its loss, once for each sample of a full batch.
        samples, self._evaluated = self._evaluated, None
        return self.accelerator.gather_for_metrics(data if samples is None else data[:samples])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if type(self).compute_loss is not MeanOfRanks.compute_loss:  # type: ignore[attr-defined]
            # Losses of TRL read the model's outputs, for metrics, before backward.
            for model in self.accelerator._models:
                if (pipeline := self.accelerator.strategy_of(model).pipeline) is not None:
                    pipeline.shares_outputs = True
        with skipping_ours():
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    # --- saving and loading ---

    def _gathering(self, save_model: Callable[..., None]) -> Callable[..., None]:
        """Return a ``save_model`` that gathers first: it may go on with rank 0 alone."""

        @functools.wraps(save_model)
        def gathered(*args: Any, **kwargs: Any) -> None:
            self._whole = self._whole_state()
            try:
                save_model(*args, **kwargs)
            finally:
                self._whole = None

        return gathered

    def _whole_state(self) -> Mapping[str, torch.Tensor] | None:
        return self.accelerator.get_state_dict(self.model) if self.accelerator._models else None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = self._whole_state() if self._whole is None else self._whole
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_state(Path(output_dir) / STATE_FOLDER, overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = Path(checkpoint) / STATE_FOLDER
        if not state.is_dir():
            if (Path(checkpoint) / OPTIMIZER_FILE).exists():
                raise CheckpointError(
                    f"expected the folder {STATE_FOLDER} in {checkpoint}, found {OPTIMIZER_FILE} "
                    "of another Trainer; load its weights with from_pretrained, and start anew"
                )
            return
        self.accelerator.load_state(state)
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _save_scaler(self, output_dir: str) -> None:
        """Leave the loss scale to the state of the run."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Leave the loss scale to the state of the run."""

    def _load_best_model(self) -> None:
        whole = self.accelerator.gathered(self.model) if self.accelerator._models else nullcontext()
        with whole:
            super()._load_best_model()  # type: ignore[misc]


class MeanOfRanks(transformers.Trainer):
    """transformers' own loss, also for the subclasses that call it: of all ranks it is the mean."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute a loss of one rank.

        transformers counts the items of all ranks, and multiplies by the number of ranks: so do
        losses that are means of a rank's own batch, as most classifiers have.
        """
        averages = self.args.average_tokens_across_devices
        if averages and num_items_in_batch is not None:
            ranks = self.accelerator.num_processes // self.get_tp_size()
            num_items_in_batch = num_items_in_batch / ranks
        self.args.average_tokens_across_devices = False
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.args.average_tokens_across_devices = averages


def use_drivetrain(kind: type = transformers.Trainer) -> Any:
    """Return a class of Trainer that trains under the launched strategy.

    Args:
        kind: ``transformers.Trainer`` or a subclass, such as ``trl.SFTTrainer``.

    Raises:
        UsageError: the class makes an Accelerator of its own.
    """
    name = StrategyTraining.create_accelerator_and_postprocess.__name__
    if getattr(kind, name) is not getattr(transformers.Trainer, name):
        raise UsageError(
            f"expected a Trainer that leaves {name} to transformers, found {kind.__name__}, which "
            "makes an Accelerator of its own; take that method out"
        )
    kinds = (MeanOfRanks,) if kind is transformers.Trainer else (kind, MeanOfRanks)
    return type(kind.__name__, (StrategyTraining, *kinds), {"__module__": kind.__module__})


Trainer = use_drivetrain()
"""``transformers.Trainer`` under the launched strategy."""


@contextmanager
def skipping_ours() -> Iterator[None]:
    """Context in which the Trainer's ``skip_first_batches`` knows our loaders."""
    module: Any = transformers.trainer
    theirs = module.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        ours = isinstance(loader, PreparedLoader)
        return (skip_first_batches if ours else theirs)(loader, num_batches)

    module.skip_first_batches = skip
    try:
        yield
    finally:
        module.skip_first_batches = theirs
