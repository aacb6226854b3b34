"""A training script written for Hugging Face Accelerate; only its import lines were changed.

With ``from accelerate import Accelerator, DataLoaderConfiguration`` and the rest from
``accelerate.utils`` and ``accelerate.logging`` it runs there too.
"""

import argparse
from pathlib import Path

import torch

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    find_batch_size,
    gather_object,
    get_logger,
    set_seed,
)

logger = get_logger(__name__)


class Doubler:
    def __init__(self):
        self.value = 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def datasets():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 8, generator=generator)
    y = (x.sum(dim=1, keepdim=True) > 0).float()
    return torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(x[:13], y[:13])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--mixed_precision", default="no")
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            project_dir=args.project, automatic_checkpoint_naming=True, total_limit=2
        ),
        kwargs_handlers=[InitProcessGroupKwargs()],
    )
    logger.info("started")
    set_seed(42)
    train, evaluation = datasets()
    loader = torch.utils.data.DataLoader(train, batch_size=4, shuffle=True)
    evaluation_loader = torch.utils.data.DataLoader(evaluation, batch_size=4)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    extra = Doubler()
    with accelerator.main_process_first():
        args.project.mkdir(parents=True, exist_ok=True)
    model, optimizer, loader, evaluation_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation_loader, scheduler
    )
    accelerator.register_for_checkpointing(extra)
    assert accelerator.prepare(model) is model
    for epoch in range(2):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for batch in loader:
            x, y = batch
            assert 1 <= find_batch_size(batch) <= 4
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    assert norm.dim() == 0
                    accelerator.clip_grad_value_(model.parameters(), 10.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert not optimizer.step_was_skipped
            total += loss.detach().float()
        accelerator.wait_for_everyone()
        mean = accelerator.reduce(total, reduction="mean") / len(loader)
        accelerator.print(f"epoch {epoch} loss {mean.item():.4f}")
        extra.value *= 2
        accelerator.save_state()
    model.eval()
    predictions, objects = [], []
    for x, y in evaluation_loader:
        with torch.no_grad():
            logits = model(x)
        logits, labels = accelerator.gather_for_metrics((logits, y))
        predictions.append((logits > 0) == (labels > 0.5))
        objects.extend(gather_object([accelerator.process_index]))
    predictions = torch.cat(predictions)
    assert len(predictions) == 13, len(predictions)
    assert set(objects) == set(range(accelerator.num_processes))
    padded = accelerator.pad_across_processes(torch.ones(accelerator.process_index + 1), dim=0)
    gathered = accelerator.gather(padded)
    n = accelerator.num_processes
    assert gathered.shape == (n * n,)
    assert gathered.sum() == n * (n + 1) / 2
    with accelerator.split_between_processes(list(range(5))) as mine:
        assert sum(gather_object([sum(mine)])) == 10
    before = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    extra.value = 0
    accelerator.load_state(args.project / "checkpoints" / "checkpoint_1")
    for name, value in accelerator.unwrap_model(model).state_dict().items():
        assert torch.equal(value.cpu(), before[name].cpu()), name
    assert extra.value == 4
    skipped = accelerator.skip_first_batches(loader, 2)
    assert len(list(skipped)) == len(loader) - 2
    accelerator.save_model(model, args.project / "export")
    accelerator.wait_for_everyone()

    @accelerator.on_main_process
    def report():
        return sorted(path.name for path in (args.project / "export").iterdir())

    names = report()
    assert names == (["model.safetensors"] if accelerator.is_main_process else None)
    accelerator.free_memory()
    accelerator.print("accuracy", round(predictions.float().mean().item(), 3))
    accelerator.end_training()


if __name__ == "__main__":
    main()
