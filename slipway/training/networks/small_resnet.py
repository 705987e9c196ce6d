"""A residual network for small images (8 to 64 px).

The usual first layers would reduce such images to a few pixels, so those here keep the resolution.
Each stage after the first halves the resolution and doubles the width. After He et al. 2016, "Deep
Residual Learning for Image Recognition". The last norm of every block starts at zero (Goyal et al.
2017), so that a block starts as the identity.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.network_arguments import Normalisation, SmallResnetArguments

# Wu and He 2018, "Group Normalization": 16 channels per group are as good as 32 groups.
_GROUP_CHANNELS = 16


class SmallResnet(nn.Module):
    """Maps (rows, channels, height, width) normalised floats to (rows, num_outputs)."""

    def __init__(self, arguments: SmallResnetArguments, channels: int, num_outputs: int) -> None:
        super().__init__()
        width, normalisation = arguments.width, arguments.normalisation
        self.stem = nn.Sequential(
            _conv3x3(channels, width), _norm(normalisation, width), nn.ReLU(inplace=True)
        )
        stages: list[_Block] = []
        for index, num_blocks in enumerate(arguments.blocks):
            entry = width if index == 0 else width // 2
            for block in range(num_blocks):
                # Later blocks are skipped more often: Huang et al. 2016, "Deep networks with
                # stochastic depth".
                skipped = arguments.stochastic_depth * (len(stages) + 1) / sum(arguments.blocks)
                stages.append(_Block(entry if block == 0 else width, width, normalisation, skipped))
            width *= 2
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(arguments.dropout)
        self.head = nn.Linear(width // 2, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to outputs (B, num_outputs)."""
        features = self.stages(self.stem(images)).mean(dim=(2, 3))  # (B, width)
        answer: Tensor = self.head(self.dropout(features))
        return answer


class _Block(nn.Module):
    """A residual block: two 3x3 convolutions and a shortcut, skipped at random in training.

    A block that changes the width halves the resolution, too.
    """

    def __init__(
        self, width_in: int, width: int, normalisation: Normalisation, skipped: float
    ) -> None:
        super().__init__()
        widens = width_in != width
        self.conv1 = _conv3x3(width_in, width, stride=2 if widens else 1)
        self.norm1 = _norm(normalisation, width)
        self.conv2 = _conv3x3(width, width)
        self.norm2 = _norm(normalisation, width)
        nn.init.zeros_(self.norm2.weight)
        self.skip = _skip(skipped)
        self.shortcut = (
            nn.Conv2d(width_in, width, kernel_size=1, bias=False) if widens else nn.Identity()
        )

    def forward(self, images: Tensor) -> Tensor:
        residual = self.skip(self.norm2(self.conv2(torch.relu_(self.norm1(self.conv1(images))))))
        if isinstance(self.shortcut, nn.Conv2d):
            images = F.avg_pool2d(images, kernel_size=2, ceil_mode=True)
        return torch.relu_(residual + self.shortcut(images))


def _skip(probability: float) -> nn.Module:
    if not probability:
        return nn.Identity()
    from timm.layers.drop import DropPath  # takes seconds to import, and few need it

    return DropPath(probability)


def _conv3x3(width_in: int, width: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(width_in, width, kernel_size=3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(normalisation: Normalisation, width: int) -> nn.BatchNorm2d | nn.GroupNorm:
    return (
        nn.BatchNorm2d(width)
        if normalisation == "batch"
        else nn.GroupNorm(width // _GROUP_CHANNELS, width)
    )
