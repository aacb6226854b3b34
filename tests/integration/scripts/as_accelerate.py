"""A script for Accelerate, unchanged: its imports, its positional arguments, its schedule."""

import argparse

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import DDPCommunicationHookType, LocalSGD, ProjectConfiguration, set_seed
from accelerate.utils.operations import gather_object
from as_accelerate_helper import describe
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)
STEPS, BATCH, RATE = 8, 2, 0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--project", required=True)
    options = parser.parse_args()
    project = ProjectConfiguration(options.project, options.project)
    accelerator = Accelerator(True, False, "no", 2, project_config=project)
    set_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    total = STEPS // 2 * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
    rows = torch.randn(STEPS * BATCH * accelerator.num_processes, 4)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    logger.info("trained", main_process_only=True)
    assert accelerator.distributed_type != DistributedType.XLA
    assert DDPCommunicationHookType.FP16 == "fp16"
    assert not isinstance(model, LocalSGD)
    ranks = gather_object([accelerator.process_index])
    accelerator.print("rate", scheduler.get_last_lr()[0], "ranks", ranks)
    accelerator.print("loss", round(accelerator.reduce(loss.detach(), "mean").item(), 6))
    accelerator.print("accelerate", accelerate.__version__, accelerate.utils.set_seed is set_seed)
    accelerator.print(describe(accelerator))
    accelerator.end_training()


if __name__ == "__main__":
    main()
