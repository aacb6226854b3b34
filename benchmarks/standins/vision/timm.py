"""Stands in for ``timm``: a small network of convolutions with a classifier."""

from torch import Tensor, nn


class Network(nn.Module):
    default_cfg = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}  # noqa: RUF012

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 8, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        )
        self.fc = nn.Linear(8 * 4 * 4, num_classes)

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).flatten(1))


def create_model(name: str, pretrained: bool = False, num_classes: int = 10) -> Network:
    return Network(num_classes)
