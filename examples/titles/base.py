"""The language model that fine-tuning starts from: loaded, or built and trained here."""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from data import Split, windows
from loop import Course, Parts, cosine, optimizer_steps
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from drivetrain import Accelerator, set_seed
from drivetrain.errors import UsageError

HEAD_WIDTH = 32
PAD, END = "<pad>", "</s>"
ROUNDING = 1e-5
"""A change of logits is rounding below this share of another change."""


def load_tokenizer(path: str | Path) -> Any:
    """Load a tokenizer; where it has no padding, its end of a text pads.

    Raises:
        UsageError: there is none, or it has neither padding nor an end.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a tokenizer in {path}, found none: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"expected a tokenizer with an end of text, and padding, found neither in {path}; set "
            'tokenizer.eos_token and tokenizer.pad_token, then tokenizer.save_pretrained("PATH")'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks and labels tell it from a real end
    return tokenizer


def load_model(path: str | Path) -> Any:
    """Load a causal language model in fp32.

    Raises:
        UsageError: there is none, or its tokens see the tokens after them.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    except (OSError, ValueError) as error:
        text = str(error).split("\n", maxsplit=1)[0]
        raise UsageError(
            f"expected a causal language model in {path}, found none: {text}"
        ) from error
    if not is_causal(model):
        raise UsageError(
            f"expected a causal language model in {path}, found a {type(model).__name__} whose "
            "words see the words after them; take a decoder, such as GPT-2, Llama or Qwen"
        )
    return model


@torch.no_grad()
def is_causal(model: Any) -> bool:
    """Whether another last token leaves the logits of the tokens before it as they are."""
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    logits = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    change = (logits[0] - logits[1]).abs().amax(dim=1)
    return bool(change[:-1].max() <= ROUNDING * change[-1])


def pretrained(
    accelerator: Accelerator, args: argparse.Namespace, pairs: Split, course: Course
) -> Path:
    """Return the folder of a small decoder, pretrained on the training text if there is none yet.

    Collective. Every ``--save-every`` steps leave a checkpoint, from which a new run goes on.
    """
    folder = Path(args.output) / "base"
    if folder.exists():
        return folder
    work = Path(args.output) / "pretraining"
    with accelerator.main_process_first():
        tokenizer = _tokenizer(work / "tokenizer", pairs, args.vocabulary)
    rows = windows(pairs.train, tokenizer, args.length)
    accelerator.print(f"pretraining on {rows.numel():,} tokens of {len(pairs.train):,} texts")
    set_seed(args.seed)
    with accelerator.building():
        model = LlamaForCausalLM(_shape(args, len(tokenizer), tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.pretrain_lr, weight_decay=0.01)
    parts = Parts(
        *accelerator.prepare(
            model,
            optimizer,
            cosine(optimizer, args.pretrain_steps),
            DataLoader(
                [{"input_ids": row, "labels": row} for row in rows],  # type: ignore[arg-type]
                args.batch,
                shuffle=True,
                drop_last=True,
            ),
        )
    )
    if accelerator.resume(work / "checkpoint"):
        accelerator.print(f"pretraining goes on at step {course.step}")
    todo = args.pretrain_steps - course.step
    steps = islice(optimizer_steps(accelerator, parts, course), todo)
    for loss in accelerator.progress(steps, desc="pretraining", total=todo):
        if course.step % args.log_every == 0:
            accelerator.log({"pretraining loss": loss()}, step=course.step)
        if course.step % args.save_every == 0:
            accelerator.save_state(work / "checkpoint", overwrite=True)
    accelerator.save_model(parts.model, work / "model")
    with accelerator.main_process_first():
        if not folder.exists():
            accelerator.unwrap_model(model).config.save_pretrained(work / "model")
            tokenizer.save_pretrained(work / "model")
            (work / "model").rename(folder)
    accelerator.free_memory()
    return folder


def _shape(args: argparse.Namespace, words: int, tokenizer: Any) -> LlamaConfig:
    heads = max(args.dim // HEAD_WIDTH, 1)
    return LlamaConfig(
        vocab_size=words,
        hidden_size=args.dim,
        intermediate_size=3 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2 * args.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    )


def _tokenizer(folder: Path, pairs: Split, words: int) -> Any:
    """Return a byte-level BPE of the training text, kept in a folder."""
    if not folder.exists():
        bare = Tokenizer(models.BPE())
        bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bare.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=words,
            special_tokens=[PAD, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (f"{pair.title}\n\n{pair.text}" for pair in pairs.train)
        bare.train_from_iterator(texts, trainer)
        made = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token=PAD, eos_token=END)
        made.save_pretrained(folder.with_suffix(".draft"))
        folder.with_suffix(".draft").rename(folder)
    return load_tokenizer(folder)
