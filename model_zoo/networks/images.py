"""Networks for images and volumes, with torch's random initial weights."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NormedConv(nn.Sequential):
    """A convolution with BatchNorm and ReLU; with `grouped`, GroupNorm and SiLU."""

    def __init__(self, before: int, after: int, stride: int, grouped: bool) -> None:
        norm = nn.GroupNorm(8, after) if grouped else nn.BatchNorm2d(after)
        super().__init__(nn.Conv2d(before, after, 3, stride, 1), norm, nn.SiLU() if grouped else nn.ReLU())


class UNet(nn.Module):
    """A U-Net: halves the image `depth` times, doubles it as often, and joins the feature maps of equal size."""

    def __init__(self, width: int, depth: int, grouped: bool, channels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = NormedConv(3, width, 1, grouped)
        self.down = nn.ModuleList(nn.Sequential(NormedConv(a, b, 2, grouped), NormedConv(b, b, 1, grouped))
                                  for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.join = nn.ModuleList(NormedConv(2 * a, a, 1, grouped) for a in widths[:-1])
        self.last = nn.Conv2d(width, channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(levels[-1]))
        out = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            out = join(torch.cat((up(out), levels.pop()), 1))
        return self.last(out)


class SuperResolution(nn.Module):
    """Super-resolution: residual convolutions at the small size, then channels become pixels. With `leaky`, LeakyReLU in place
    of PReLU; with `plain`, one convolution per block and bicubic enlargement."""

    def __init__(self, width: int, blocks: int, factor: int, leaky: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.factor, self.plain = factor, plain
        self.first = nn.Conv2d(3, width, 5, 1, 2) if plain else nn.Conv2d(3, width, 3, 1, 1)
        self.last = nn.Conv2d(width, 3 * factor**2, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.LeakyReLU(0.2) if leaky else nn.PReLU(width),
                          *([] if plain else [nn.Conv2d(width, width, 3, 1, 1)])) for _ in range(blocks))

    def forward(self, image: Tensor) -> Tensor:
        out = self.first(image)
        for block in self.blocks:
            out = out + (block(out) if self.plain else 0.2 * block(out))
        scale = float(self.factor)
        if self.plain:
            return F.pixel_shuffle(self.last(out), self.factor) + F.interpolate(image, scale_factor=scale, mode="bicubic")
        larger = F.interpolate(image, scale_factor=scale, mode="bilinear", align_corners=False)
        return F.pixel_shuffle(self.last(out), self.factor) + larger


class DiffusionBlock(nn.Module):
    """A block of a diffusion model: convolutions with a time embedding, self-attention, attention to a text, a gated layer."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(16, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True, kdim=96, vdim=96)
        self.gate, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.last = nn.Conv2d(width, 4, 3, 1, 1)

    def forward(self, latent: Tensor, time: Tensor, text: Tensor) -> Tensor:
        angle = time[:, None].to(torch.float32) * torch.exp(-torch.arange(32) / 32 * math.log(1e4))
        x = self.into(latent)
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(torch.cat((angle.sin(), angle.cos()), -1))[:, :, None, None]
        x = x + self.convs[1](F.silu(self.norms[1](y)))
        y = self.norms[2](x).flatten(2).transpose(1, 2)
        z = self.layer_norms[0](y)
        y = y + self.own(z, z, z, need_weights=False)[0]
        y = y + self.cross(self.layer_norms[1](y), text, text, need_weights=False)[0]
        a, b = self.gate(self.layer_norms[2](y)).chunk(2, -1)
        y = y + self.out(a * F.gelu(b))
        return self.last(x + y.transpose(1, 2).reshape(x.shape))


class StyleNet(nn.Module):
    """A style transfer network: convolutions with InstanceNorm and mirrored borders, then resizing."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 1 if a == 3 else 2) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.InstanceNorm2d(b, affine=True) for b in sizes[1:])
        self.block, self.block_norm = nn.Conv2d(sizes[-1], sizes[-1], 3), nn.InstanceNorm2d(sizes[-1], affine=True)
        self.up, self.last = nn.Conv2d(sizes[-1], width, 3), nn.Conv2d(width, 3, 9)

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(conv(F.pad(x, (1, 1, 1, 1), "reflect"))))
        x = x + self.block_norm(self.block(F.pad(x, (1, 1, 1, 1), "reflect")))
        x = F.relu(self.up(F.interpolate(x, scale_factor=4.0, mode="nearest")))
        return torch.sigmoid(self.last(F.pad(x, (4, 4, 4, 4), "reflect")))


class SpatialTransformer(nn.Module):
    """A spatial transformer: computes an affine map, samples the image with it, then applies convolutions."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6))
        self.convs = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
                                   nn.Conv2d(width, width, 3, 1, 1))
        y, x = torch.meshgrid(torch.linspace(-1, 1, 128), torch.linspace(-1, 1, 128), indexing="ij")
        self.register_buffer("plane", torch.stack((x, y, torch.ones_like(x)), -1).reshape(-1, 3))

    def forward(self, image: Tensor) -> Tensor:
        grid = (self.plane @ self.look(image).reshape(-1, 2, 3).transpose(1, 2)).reshape(-1, 128, 128, 2)
        return self.convs(F.grid_sample(image, grid, align_corners=False))


class VolumeConvs(nn.Module):
    """A classifier of volumes: 3-D convolutions with BatchNorm or InstanceNorm, and pooling."""

    def __init__(self, width: int, stages: int, instance: bool) -> None:
        super().__init__()
        widths = [1, *(width * 2**stage for stage in range(stages))]
        norm = nn.InstanceNorm3d if instance else nn.BatchNorm3d
        self.stages = nn.Sequential(*(layer for a, b in itertools.pairwise(widths) for layer in
                                      (nn.Conv3d(a, b, 3, 1, 1), norm(b, affine=True), nn.LeakyReLU(0.01), nn.MaxPool3d(2))))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, volume: Tensor) -> Tensor:
        return self.head(self.stages(volume).mean((2, 3, 4)))


class VolumeNet(nn.Module):
    """A small 3-D U-Net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = nn.Conv3d(1, width, 3, 1, 1), nn.Conv3d(width, 2 * width, 3, 2, 1)
        self.norms = nn.ModuleList(nn.BatchNorm3d(size) for size in (width, 2 * width, width))
        self.up, self.join = nn.ConvTranspose3d(2 * width, width, 2, 2), nn.Conv3d(2 * width, width, 3, 1, 1)
        self.last = nn.Conv3d(width, 2, 1)

    def forward(self, volume: Tensor) -> Tensor:
        a = F.relu(self.norms[0](self.first(volume)))
        b = F.relu(self.norms[1](self.down(a)))
        return self.last(F.relu(self.norms[2](self.join(torch.cat((self.up(b), a), 1)))))


class Pyramid(nn.Module):
    """A feature pyramid with several inputs (two images and a vector) and outputs (three feature maps and a vector)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(3, width, 3, 2, 1)
        self.down = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, 2, 1) for _ in range(2))
        self.side = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(3))
        self.mix = nn.Linear(16, 2 * width)

    def forward(self, left: Tensor, right: Tensor, extra: Tensor) -> tuple[Tensor, ...]:
        maps = [F.relu(torch.cat((self.left(left), self.right(right)), 1))]
        for conv in self.down:
            maps.append(F.relu(conv(maps[-1])))
        x = torch.zeros(1)
        merged: list[Tensor] = []
        for side, level_map in zip(reversed(self.side), reversed(maps), strict=True):
            x = side(level_map) + (F.interpolate(x, scale_factor=2.0) if merged else 0.0)
            merged.append(x)
        return (*merged, maps[-1].mean((2, 3)) * torch.sigmoid(self.mix(extra)))


class ScalarLoss(nn.Module):
    """Convolutions whose outputs are two scalars."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convs(image)
        return x.abs().max(), (x * x).mean()
