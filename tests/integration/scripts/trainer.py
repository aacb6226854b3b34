"""transformers.Trainer on a tiny Llama: losses, norms and evaluations go into a file."""

import argparse
import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

WORDS, LENGTH, STEPS, BATCH = 64, 16, 20, 8


def rows():
    """Sentences whose labels end at different places: batches have other numbers of them."""
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS * BATCH + 3):
        first, stride = torch.randint(1, 5, (2,), generator=generator)
        words = (first + stride * torch.arange(LENGTH)) % WORDS
        yield {"input_ids": words, "labels": words.where(torch.arange(LENGTH) < 6 + i % 10, -100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, help="that have batches of their own")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--resume")
    options = parser.parse_args()
    Trainer = transformers.Trainer
    if not options.plain:
        from drivetrain.integrations.transformers import Trainer
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH // options.ranks // options.accumulation,
        per_device_eval_batch_size=BATCH // options.ranks,
        gradient_accumulation_steps=options.accumulation,
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_steps=STEPS // 2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the model of step 10, which is not the last one
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
    )
    data = list(rows())
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[: 2 * BATCH + 3])
    trainer.train(resume_from_checkpoint=options.resume)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.folder / "export"))
    if arguments.process_index == 0:
        history = trainer.state.log_history
        record = {
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
            "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
            "best": trainer.state.best_metric,
            "evaluated": evaluated,
        }
        (options.folder / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
