"""Networks for images: the small residual network, those of timm, and the user's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipway.config.network_arguments import Normalisation, SmallResnetArguments
from slipway.inputs.images import ImageContract
from slipway.system.errors import ParamsError, nearest
from slipway.system.user_code import is_user_code
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.user_network import user_backbone

# Wu and He 2018, "Group Normalization": 16 channels per group are as good as 32 groups.
_GROUP_CHANNELS = 16
_TIMM = "timm/"


class ImageNetwork(Network):
    """Maps (rows, height, width, channels) uint8 in [0, 255] to (rows, classes) logits.

    For a numeric target the output is (rows, 1) in its unit.
    """

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        per_channel = (1, -1, 1, 1)
        mean = torch.tensor(spec.mean).mul(255).view(per_channel)
        scale = torch.tensor(spec.std).mul(255).reciprocal().view(per_channel)
        self.register_buffer("pixel_mean", mean, persistent=False)
        self.register_buffer("pixel_scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, H, W, C) uint8 to outputs (B, K)."""
        return self.to_target_unit(self.backbone(self.backbone_inputs(images)))

    def backbone_inputs(self, images: Tensor) -> Tensor:
        """Map images (B, H, W, C) uint8 to normalised pixels (B, C, H, W) float32."""
        # The cast comes first: TensorRT transposes no uint8.
        pixels = images.to(torch.float32).permute(0, 3, 1, 2)
        return (pixels - self.pixel_mean) * self.pixel_scale

    def misfit(self, error: Exception) -> str:
        """Return a sentence on why the network cannot read images of this size, and the remedy."""
        height, width, channels = self.spec.input.shape
        return (
            f"cannot take images of {height}x{width} px with {channels} "
            f"channels: {error}. Change precompute.image_size_px, or give the size in "
            "train.network_arguments (img_size for many of timm)."
        )


def image_network(spec: NetworkSpec) -> ImageNetwork:
    """Build the network of a spec for images. Raises ParamsError for an unknown name."""
    assert isinstance(spec.input, ImageContract)
    channels = spec.input.channels
    if spec.name == "small_resnet":
        arguments = parse_arguments(spec, SmallResnetArguments)
        return ImageNetwork(SmallResnet(arguments, channels, spec.num_outputs), spec)
    if spec.name.startswith(_TIMM):
        return ImageNetwork(_timm_network(spec, channels), spec)
    if is_user_code(spec.name):
        height, width, _ = spec.input.shape
        return ImageNetwork(user_backbone(spec, (channels, height, width)), spec)
    raise ParamsError(
        f"train.network is {spec.name!r}, expected 'small_resnet' or 'timm/NAME', for example "
        "'timm/resnet18'."
    )


def _timm_network(spec: NetworkSpec, channels: int) -> nn.Module:
    import timm

    name = spec.name.removeprefix(_TIMM)
    if not timm.is_model(name):
        close = nearest(name, timm.list_models(), most=3)
        known = " or ".join(repr(_TIMM + each) for each in close)
        hint = f"; did you mean {known}?" if close else "."
        raise ParamsError(
            f"train.network is 'timm/{name}', which timm {timm.__version__} lacks{hint}"
        )
    reserved = sorted({"pretrained", "in_chans", "num_classes"} & set(spec.arguments))
    if reserved:
        raise ParamsError(
            f"train.network_arguments names {', '.join(reserved)}, which Slipway sets itself from "
            "the data. Remove it."
        )
    try:
        network: nn.Module = timm.create_model(
            name,
            pretrained=False,
            in_chans=channels,
            num_classes=spec.num_outputs,
            **spec.arguments,
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ParamsError(
            f"timm/{name} refuses train.network_arguments {spec.arguments}: {error}"
        ) from error
    return network


class SmallResnet(nn.Module):
    """A residual network for small images: (B, C, H, W) normalised floats to (B, num_outputs).

    The usual first layers would reduce images of 8 to 64 px to a few pixels, so those here keep the
    resolution. Each stage after the first halves the resolution and doubles the width. After He et
    al. 2016, "Deep Residual Learning for Image Recognition". The last norm of every block starts at
    zero (Goyal et al. 2017), so that a block starts as the identity.
    """

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
