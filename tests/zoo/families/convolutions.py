"""Nets of convolutions in plain torch: a classifier, residuals, a U-Net, two nets in a game."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from families.family import Batch, Family, Models, Phase, integers, numbers, plain

KIND = "convolutions"
SIDE, CLASSES, NOISE = 8, 5, 6


def _pictures(seed: int) -> Batch:
    return {"images": numbers(seed, 3, SIDE, SIDE), "labels": integers(seed, 0, CLASSES)}


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


class Residual(nn.Module):
    """Two convolutions around which the input goes; the first may halve the image."""

    def __init__(self, width: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)])
        self.around = nn.Conv2d(width, wider, 1, stride) if wider != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (rows, wider, side, side)."""
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.around(x))


def _residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(Residual(8, 8), Residual(8, 8)),
        nn.Sequential(Residual(8, 12, 2), Residual(12, 12)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


class Level(nn.Module):
    """A convolution that is told the time."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv2d(width, wider, 3, padding=1)
        self.time = nn.Linear(8, wider)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return shape (rows, wider, side, side)."""
        return F.silu(self.conv(self.norm(x)) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    """Finds the noise in a picture: levels down, levels up, and skips from each to its twin."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.into = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Level(8, 8), Level(8, 16)])
        self.middle = Level(16, 16)
        self.up = nn.ModuleList([Level(32, 8), Level(16, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the noise, shaped like the input."""
        told, x, skips = self.time(time[:, None]), self.into(noisy), []
        for level in self.down:
            x = level(x, told)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, told)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), told)
        result: Tensor = self.out(x)
        return result


def _noisy(seed: int) -> Batch:
    noise, time = numbers(seed, 3, SIDE, SIDE), numbers(seed + 500).sigmoid()
    scale = time[:, None, None, None]
    pictures = numbers(seed + 900, 3, SIDE, SIDE) * (1 - scale)
    return {"noisy": pictures + noise * scale, "time": time, "noise": noise}


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["noisy"], batch["time"]), batch["noise"])


def _bounded_net() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 8, 3, 2, 1)),
        nn.LeakyReLU(0.2),
        spectral_norm(nn.Conv2d(8, 12, 3, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        spectral_norm(nn.Linear(12 * (SIDE // 4) ** 2, CLASSES)),
    )


def _game() -> Models:
    generator = nn.Sequential(
        nn.Linear(NOISE, 12 * 4),
        nn.Unflatten(1, (12, 2, 2)),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 8, 4, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1),
        nn.Tanh(),
    )
    judge = nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 12, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(48, 1),
    )
    return generator, judge


def _pictures_and_noise(seed: int) -> Batch:
    return {"images": numbers(seed, 3, SIDE, SIDE), "noise": numbers(seed + 500, NOISE)}


def _judged(models: Models, batch: Batch) -> Tensor:
    generator, judge = models
    with torch.no_grad():
        false = generator(batch["noise"])
    real = judge(batch["images"])
    return F.softplus(-real).mean() + F.softplus(judge(false)).mean()


def _deceived(models: Models, batch: Batch) -> Tensor:
    generator, judge = models
    return F.softplus(-judge(generator(batch["noise"]))).mean()


CONVOLUTIONS = {
    "conv-net": plain(KIND, _net, _pictures, _classified),
    "residual-net": plain(KIND, _residual_net, _pictures, _classified),
    "diffusion-unet": plain(KIND, UNet, _noisy, _denoised),
    "spectral-norm": plain(KIND, _bounded_net, _pictures, _classified),
    "gan": Family(
        kind=KIND,
        make=_game,
        batch=_pictures_and_noise,
        phases=(Phase(1, _judged), Phase(0, _deceived)),
    ),
}
