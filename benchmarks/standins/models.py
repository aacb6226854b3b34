"""Writes tiny models and tokenizers, under the names that Accelerate's scripts load."""

from pathlib import Path

import torch
from datasets import WORDS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CLASSIFIERS = ("bert-base-cased", "hf-internal-testing/mrpc-bert-base-cased")
LANGUAGE_MODELS = ("HuggingFaceTB/SmolLM-360M",)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_models(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    for name in CLASSIFIERS:
        BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name in LANGUAGE_MODELS:
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        model_max_length=64,
    )
