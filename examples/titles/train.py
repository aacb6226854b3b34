"""Fine-tunes a language model with LoRA to write titles, and judges it before and after.

    drivetrain launch --nproc-per-node 2 examples/titles/train.py
    drivetrain launch --nproc-per-node 2 --strategy zero3 examples/titles/train.py --output runs/z3
    drivetrain launch --nproc-per-node 2 examples/titles/train.py --model PATH --data pairs.jsonl

A run that was killed goes on when its command is given again. The folder of the run gets the
scores (result.json), titles side by side (samples.md), the adapter (adapter) and the merged model
(merged).
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    from base import load_model, load_tokenizer, pretrained
    from data import SOURCES, Examples, Split, prompt_batch, read_split, training_batch
    from evaluate import Score, generated, held_out_loss, judged
    from loop import Course, Parts, cosine, optimizer_steps
    from peft import LoraConfig, PeftModel
    from transformers.utils.logging import disable_progress_bar
except ImportError as missing:
    sys.exit(f"{missing}; this example needs: pip install -c constraints.txt '.[titles]'")
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DataLoaderConfiguration, gather_object, set_seed
from drivetrain.errors import UsageError

SAMPLES = 20
FREE = ("log_every", "save_every", "output")
"""Arguments that may change when a run goes on."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ", ".join(SOURCES)
    add = parser.add_argument
    add("--data", default="docstrings", help=f"{names}, or a file of pairs (JSON lines, TSV)")
    add(
        "--held-out", type=int, default=600, help="pairs of the test set, and of the validation set"
    )
    add("--model", help="folder or hub name; default: a small decoder, trained here")
    add("--output", default="runs/titles", help="folder of the run")
    add("--batch", type=int, default=32, help="pairs per step, over all ranks")
    add("--length", type=int, default=128, help="tokens of text and title")
    add("--title-length", type=int, default=24, help="tokens of a title at most")
    add("--steps", type=int, default=300, help="optimizer steps of fine-tuning at most")
    add("--lr", type=float, default=3e-3, help="highest learning rate of fine-tuning")
    add("--lora-rank", type=int, default=8)
    add("--targets", default="all-linear", help="layers with adapters, by name: q_proj,v_proj")
    add("--validate-every", type=int, default=50, help="steps between validations and checkpoints")
    add("--patience", type=int, default=3, help="validations without a lower loss before the end")
    add("--log-every", type=int, default=10, help="steps between logged losses")
    add("--seed", type=int, default=0)
    add("--no-before", action="store_true", help="do not judge the model before fine-tuning")
    small = parser.add_argument_group("the small decoder")
    add = small.add_argument
    add("--pretrain-steps", type=int, default=900)
    add("--pretrain-lr", type=float, default=4e-3)
    add("--save-every", type=int, default=100, help="steps of pretraining between checkpoints")
    add("--vocabulary", type=int, default=4096, help="words of its tokenizer")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    return parser.parse_args(words)


class Task(NamedTuple):
    """A prepared model to fine-tune, with loaders for validation and for titles."""

    parts: Parts
    validation: Any
    prompts: Any
    tokenizer: Any


def prepare(
    accelerator: Accelerator, args: argparse.Namespace, pairs: Split, base: str | Path
) -> Task:
    """Put adapters into the base model, and prepare it with its data."""
    tokenizer = load_tokenizer(base)
    train, validation, test = (
        Examples(part, tokenizer, args.length, args.title_length)
        for part in (pairs.train, pairs.validation, pairs.test)
    )
    whole = partial(training_batch, pad=tokenizer.pad_token_id)
    prompts = partial(prompt_batch, pad=tokenizer.pad_token_id)
    set_seed(args.seed)  # adapters begin alike on all ranks
    model = adapted(base, args)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0)
    share = sum(p.numel() for p in trained) / sum(p.numel() for p in model.parameters())
    accelerator.print(f"{accelerator!r}\n{share:.1%} of the parameters are trained")
    model, optimizer, scheduler, loader, validation_loader, prompt_loader = accelerator.prepare(
        model,
        optimizer,
        cosine(optimizer, args.steps),
        DataLoader(train, args.batch, shuffle=True, drop_last=True, collate_fn=whole),
        DataLoader(validation, args.batch, collate_fn=whole),
        DataLoader(test, 2 * args.batch, collate_fn=prompts),
    )
    parts = Parts(model, optimizer, scheduler, loader)
    return Task(parts, validation_loader, prompt_loader, tokenizer)


def adapted(base: str | Path, args: argparse.Namespace) -> Any:
    """Return a model with adapters, which change nothing before they are trained."""
    targets = args.targets if args.targets == "all-linear" else args.targets.split(",")
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=2 * args.lora_rank,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model = load_model(base)
    try:
        model.add_adapter(config)  # by transformers: model.generate stays the model's own
    except ValueError as error:
        raise UsageError(f"expected layers of the model in --targets: {error}") from error
    return model


def fine_tune(
    accelerator: Accelerator, args: argparse.Namespace, task: Task, course: Course
) -> Course:
    """Train the adapters until steps or patience end, and go back to the best of them."""
    last, best = (Path(args.output) / "checkpoints" / name for name in ("last", "best"))
    if accelerator.resume(last):
        accelerator.print(f"fine-tuning goes on at step {course.step}")
    todo = args.steps - course.step if course.stale < args.patience else 0
    steps = islice(optimizer_steps(accelerator, task.parts, course), todo)
    for loss in accelerator.progress(steps, desc="fine-tuning", total=todo):
        if course.step % args.log_every == 0:
            accelerator.log({"loss": loss()}, step=course.step)
        if course.step % args.validate_every and course.step < args.steps:
            continue
        found = held_out_loss(accelerator, task.parts.model, task.validation)
        accelerator.print(f"step {course.step}: held-out loss {found:.4f}")
        accelerator.log({"held-out loss": found}, step=course.step)
        accelerator.report(held_out_loss=found)
        course.stale = 0 if found < course.best else course.stale + 1
        course.best = min(found, course.best)
        if not course.stale:
            accelerator.save_state(best, overwrite=True)
        accelerator.save_state(last, overwrite=True)
        if course.stale >= args.patience:
            accelerator.print(f"no lower loss in {args.patience} validations")
            break
    taken = Course(**course.state_dict())
    accelerator.load_state(best)
    return taken


def judge(accelerator: Accelerator, args: argparse.Namespace, task: Task, pairs: Split) -> Any:
    """Return held-out loss, scores and titles of the model as it is."""
    model = task.parts.model
    loss = held_out_loss(accelerator, model, task.validation)
    titles = generated(accelerator, model, task.prompts, task.tokenizer, args.title_length)
    return {"held-out loss": loss, **judged(titles, pairs.test)}


def judged_before(
    accelerator: Accelerator, args: argparse.Namespace, task: Task, pairs: Split
) -> Any:
    """Return how good the base model is; a file keeps it, since a new run starts with adapters."""
    kept = Path(args.output) / "before.json"
    if args.no_before:
        return None
    if not kept.exists():
        found = judge(accelerator, args, task, pairs)
        write(accelerator, kept, json.dumps(found, ensure_ascii=False))
    return json.loads(kept.read_text())


def export(
    accelerator: Accelerator, args: argparse.Namespace, task: Task, base: str | Path
) -> None:
    """Write the adapter in peft's format, and the merged model with its tokenizer. Collective."""
    state = accelerator.get_state_dict(task.parts.model)
    adapter, merged = (Path(args.output) / name for name in ("adapter", "merged"))
    if accelerator.is_main_process:
        whole = adapted(base, args)
        whole.load_state_dict(state)
        whole.save_pretrained(adapter)
        PeftModel.from_pretrained(load_model(base), adapter).merge_and_unload().save_pretrained(
            merged
        )
        task.tokenizer.save_pretrained(merged)
    accelerator.wait_for_everyone()


def write(accelerator: Accelerator, file: Path, text: str) -> None:
    """Write a file on rank 0, whole or not at all, before any rank goes on."""
    if accelerator.is_main_process:
        draft = file.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.rename(file)
    accelerator.wait_for_everyone()


def samples(pairs: Split, before: Any, after: Any) -> str:
    """Return titles side by side, as a table of Markdown."""
    lines = ["| title | before | after |", "|---|---|---|"]
    early = before["titles"] if before else [""] * len(pairs.test)
    for pair, old, new in islice(zip(pairs.test, early, after["titles"], strict=True), SAMPLES):
        cells = (text.replace("|", "\\|").replace("\n", " ") for text in (pair.title, old, new))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def check_settings(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Keep the run's arguments in its folder; a run that goes on must have the same."""
    file = Path(args.output) / "settings.json"
    mine = {name: value for name, value in sorted(vars(args).items()) if name not in FREE}
    Path(args.output).mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    if not file.exists():
        accelerator.wait_for_everyone()
        write(accelerator, file, json.dumps(mine, indent=1))
        return
    kept = json.loads(file.read_text())
    changed = [name for name in mine if mine[name] != kept.get(name)]
    if changed:
        told = ", ".join(f"{name} = {kept.get(name)}, found {mine[name]}" for name in changed)
        raise UsageError(
            f"expected the arguments of the run in {args.output}: {told}; take another --output"
        )


def run(args: argparse.Namespace, accelerator: Accelerator) -> dict[str, Any]:
    """Do the rest of the experiment, and return the result."""
    check_settings(accelerator, args)
    with accelerator.local_main_process_first():
        pairs = read_split(args.data, args.held_out, Path(args.output) / "pairs.json")
    counts = [len(part) for part in (pairs.train, pairs.validation, pairs.test)]
    accelerator.print("pairs: {:,} train, {:,} validation, {:,} test".format(*counts))
    accelerator.init_trackers("titles", vars(args))
    course = Course()
    accelerator.register_for_checkpointing(course)  # once: each checkpoint has its state
    base = args.model or pretrained(accelerator, args, pairs, course)
    course.load_state_dict(Course().state_dict())
    task = prepare(accelerator, args, pairs, base)
    before = judged_before(accelerator, args, task, pairs)
    course = fine_tune(accelerator, args, task, course)
    after = judge(accelerator, args, task, pairs)
    export(accelerator, args, task, base)
    ranks = gather_object([{"sent": course.sent, "memory": course.memory}])
    result = {
        "ranks": ranks,
        "steps": course.step,
        "seconds": course.seconds,
        "loss": after["held-out loss"],
        "scores": {"before": before and before["scores"], "after": after["scores"]},
        "loss before": before and before["held-out loss"],
    }
    write(accelerator, Path(args.output) / "samples.md", samples(pairs, before, after))
    write(accelerator, Path(args.output) / "result.json", json.dumps(result, indent=1))
    tell(accelerator, result)
    return result


def tell(accelerator: Accelerator, result: dict[str, Any]) -> None:
    """Print loss and scores, before and after."""
    before, after = result["scores"]["before"], result["scores"]["after"]
    accelerator.print(f"held-out loss {result['loss']:.4f}, before {result['loss before']}")
    for name, score in after.items():
        old = f"before {Score(**before[name])}, " if before else ""
        accelerator.print(f"{name:8} {old}after {Score(**score)}")


def main() -> None:
    args = arguments()
    disable_progress_bar()  # of loading weights, on every rank
    # peft asks transformers for an attribute by its old name.
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
    accelerator = Accelerator(
        project_dir=args.output,
        log_with=["jsonl"],
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    try:
        run(args, accelerator)
    except UsageError as error:
        sys.exit(str(error) if accelerator.is_main_process else 1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
