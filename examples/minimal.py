"""The smallest training script: an ordinary loop; the lines marked (+) come from drivetrain."""

import torch

from drivetrain import Accelerator  # (+)

accelerator = Accelerator()  # (+) strategy, precision and ranks come from the launch configuration
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(512, 16, generator=generator)
targets = inputs.sin().sum(dim=1, keepdim=True)
dataset = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # (+)
for epoch in range(5):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)  # (+) instead of loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")
