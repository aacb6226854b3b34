"""Short runs of Trainers on tiny Llamas: of transformers and of TRL, plain or under a strategy."""

import copy
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

WORDS, LENGTH, STEPS, BATCH = 64, 16, 20, 8
STRATEGIES = {name: {"name": name} for name in ("ddp", "zero2", "zero3", "fsdp")}
STRATEGIES |= {axis: {"name": "megatron", axis: 2} for axis in ("tp", "pp")}


def launched(monkeypatch: Any, folder: Path, strategy: str, **settings: object) -> None:
    """Let this process find a launch configuration."""
    path = folder / f"launched-{os.getpid()}.json"
    path.write_text(json.dumps({"strategy": STRATEGIES[strategy], **settings}))
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(path))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))


def arguments(
    kind: type, folder: Path, ranks: int, *, accumulation: int = 1, **changed: Any
) -> TrainingArguments:
    """Return arguments with which ``ranks`` ranks of their own batches take the same samples."""
    usual = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": BATCH // ranks // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(str(folder), **usual | changed)


def record(trainer: Any, folder: Path) -> dict[str, Any]:
    """Return what a run logged; on the first rank with the weights, exported."""
    trainer.save_model(str(folder / "export"))
    history = trainer.state.log_history
    found: dict[str, Any] = {
        name: [entry[key] for entry in history if key in entry and "loss" in entry]
        for name, key in (("losses", "loss"), ("norms", "grad_norm"), ("rates", "learning_rate"))
    }
    found["best"] = trainer.state.best_metric
    if trainer.args.process_index == 0:
        (exported,) = (folder / "export").glob("*model.safetensors")  # the model, or its adapters
        found["weights"] = load_file(exported)
    trainer.accelerator.free_memory()
    return found


def rows():
    """Sentences whose labels end at different places: batches have other numbers of them."""
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS * BATCH + 3):
        first, stride = torch.randint(1, 5, (2,), generator=generator)
        words = (first + stride * torch.arange(LENGTH)) % WORDS
        yield {"input_ids": words, "labels": words.where(torch.arange(LENGTH) < 6 + i % 10, -100)}


def train_causal(
    made: Callable[[type], type],
    folder: Path,
    ranks: int,
    *,
    resume: str | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """Train transformers' own Trainer, evaluating, saving and reloading on the way."""
    usual = {
        "per_device_eval_batch_size": BATCH // ranks,
        "eval_strategy": "steps",
        "eval_steps": STEPS // 2,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the model of step 10, which is not the last one
    }
    data = list(rows())
    trainer = made(transformers.Trainer)(
        tiny_llama(),
        arguments(TrainingArguments, folder, ranks, **usual | changed),
        train_dataset=data,
        eval_dataset=data[: 2 * BATCH + 3],
    )
    trainer.train(resume_from_checkpoint=resume)
    evaluated = trainer.evaluate()["eval_loss"]
    return record(trainer, folder) | {"evaluated": evaluated}


# --- TRL ---


def tokenizer() -> Any:
    """Return a tokenizer whose words are w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentence(first: int, stride: int, length: int) -> str:
    return " ".join(f"w{(first + stride * i) % (WORDS - 3)}" for i in range(length))


def prompts():
    """Prompts of one length with completions of several."""
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS * BATCH):
        first, stride = torch.randint(1, 5, (2,), generator=generator).tolist()
        prompt, rest = sentence(first, stride, 4) + " ", 3 + i % 7
        right = sentence(first + 4 * stride, stride, rest) + " "
        yield prompt, right, sentence(first + 3, stride + 1, 10 - rest) + " "


def train_sft(
    made: Callable[[type], type], folder: Path, ranks: int, **changed: Any
) -> dict[str, Any]:
    """Train TRL's SFTTrainer on completions."""
    import trl
    from datasets import Dataset

    data = [{"prompt": prompt, "completion": right} for prompt, right, _ in prompts()]
    trainer = made(trl.SFTTrainer)(
        tiny_llama(),
        arguments(trl.SFTConfig, folder, ranks, **changed),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    trainer.train()
    return record(trainer, folder) | metrics(trainer, "entropy", "mean_token_accuracy")


def train_dpo(
    made: Callable[[type], type],
    folder: Path,
    ranks: int,
    *,
    adapters: bool = False,
    **changed: Any,
) -> dict[str, Any]:
    """Train TRL's DPOTrainer beside a reference model, a copy of the first weights.

    Of a model with adapters of peft the reference is the one without them.
    """
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    data = [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in prompts()]
    model = tiny_llama()
    beside: dict[str, Any] = {"ref_model": copy.deepcopy(model)}
    if adapters:
        places = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        beside = {"peft_config": LoraConfig(r=4, lora_alpha=8, **places)}
    else:
        changed["learning_rate"] = 1e-3
    trainer = made(trl.DPOTrainer)(
        model,
        args=arguments(trl.DPOConfig, folder, ranks, **changed),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
        **beside,
    )
    trainer.train()
    return record(trainer, folder) | metrics(trainer, "rewards/margins", "logps/chosen")


def metrics(trainer: Any, *names: str) -> dict[str, Any]:
    history = trainer.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in names}


TRAININGS = {"causal": train_causal, "sft": train_sft, "dpo": train_dpo}
TRAININGS["lora"] = partial(train_dpo, adapters=True)


def train(name: str, made: Callable[[type], type], *args: Any, **options: Any) -> dict[str, Any]:
    """Run one of the trainings; forget what transformers remembers of the ranks."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return TRAININGS[name](made, *args, **options)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
