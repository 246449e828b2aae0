"""Small networks that are written without importing esper, as users write them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet with BatchNorm; the in-place ReLU of each block runs twice per forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        cin = 1
        for width in (4, "M", 8, "M"):
            if width == "M":
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(cin, int(width), 3, padding=1), nn.ReLU(inplace=True)]
            cin = int(width)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(8 * 4, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class ConvBNReLU(nn.Sequential):
    def __init__(self, cin: int, cout: int, kernel: int = 3, groups: int = 1) -> None:
        pad = kernel // 2
        conv = nn.Conv2d(cin, cout, kernel, padding=pad, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(cout), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        hidden = 2 * cin
        self.use_res = cin == cout
        self.conv = nn.Sequential(
            ConvBNReLU(cin, hidden, 1),
            ConvBNReLU(hidden, hidden, groups=hidden),
            nn.Conv2d(hidden, cout, 1, bias=False),
            nn.BatchNorm2d(cout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ConvBNReLU(1, 4), InvertedResidual(4, 4), InvertedResidual(4, 6), InvertedResidual(6, 6)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean([2, 3]))


class DoubleConv(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet(nn.Module):
    """Segmentation network with one logit per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down, self.mid = DoubleConv(1, 4), nn.MaxPool2d(2), DoubleConv(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.dec = DoubleConv(8, 4)
        self.outc = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.inc(x)
        x = self.up(self.mid(self.down(skip)))
        return self.outc(self.dec(torch.cat([skip, x], dim=1)))


class ViT(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.patch = nn.Conv2d(1, 8, 4, 4)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 4, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=batch_first, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        x = self.encoder(x) if self.batch_first else self.encoder(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x.mean(1))


class TextEncoder(nn.Module):
    """Transformer encoder with a padding mask, for which torch uses nested tensors in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding)[:, 0])


def padded() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (2, 6)), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 2 * width), "act": nn.GELU(), "c_proj": nn.Linear(2 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(self.mlp.act(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """GPT whose embedding and output layer share a weight; ``forward`` returns a loss if given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([Block(8) for _ in range(2)])
        self.ln_f = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class GRUNet(nn.Module):
    """Regression network with a GRU layer, which returns a tuple."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn = nn.GRU(3, 8, batch_first=batch_first)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, _state = self.rnn(x if self.batch_first else x.transpose(0, 1))
        return self.out(output[:, -1] if self.batch_first else output[-1])


class Signals(nn.Module):
    """Network of one-dimensional convolutions on ``[batch, channels, time]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.down = nn.Conv1d(8, 4, 3, stride=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.conv(x)).mean(-1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(5, 4)
        self.joint = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor, table: Tensor, *, scale: float = 1.0) -> Tensor:
        joint = torch.cat([F.relu(self.image(image)).mean((2, 3)), self.table(table)], 1)
        return scale * self.head(F.relu(self.joint(joint)))


@dataclass
class Encoded:
    hidden: Tensor
    norm: Tensor | None = None


class DataclassEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 8)

    def forward(self, batch: dict[str, Tensor]) -> Encoded:
        return Encoded(hidden=torch.tanh(self.lin(batch["x"])))


class DictHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, encoded: Encoded) -> dict[str, Tensor]:
        return {"size": encoded.hidden.norm(dim=-1), "z": torch.relu(self.lin(encoded.hidden))}


class DictNet(nn.Module):
    """Network with dicts as input and output, and a dataclass and a dict between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.head = DataclassEncoder(), DictHead(), nn.Linear(8, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        inner = self.middle(self.encoder(batch))
        return {"logits": self.head(inner["z"]), "size": inner["size"]}


class WindowBlock(nn.Module):
    """Block on ``[batch, height, width, channels]`` with attention in windows of 2 × 2, as in Swin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        b, rows, columns, c = h.shape
        windows = self.norm1(h).view(b, rows // 2, 2, columns // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        mixed = self.attention(windows, windows, windows, need_weights=False)[0]
        mixed = mixed.view(b, rows // 2, columns // 2, 2, 2, c).transpose(2, 3).reshape(h.shape)
        h = h + mixed
        return h + self.mlp(self.norm2(h))


class WindowNet(nn.Module):
    """Image classifier whose features have their channels last; images of several sizes are accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(1, 8, 2, 2), nn.ModuleList(WindowBlock(8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean((1, 2)))


class Siamese(nn.Module):
    """Distance of two images by an encoder of residual blocks that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), BasicBlock(4, 4), BasicBlock(4, 4), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.head((self.encoder(one) - self.encoder(other)).flatten(1).square())


class Volumes(nn.Module):
    """Classifier of volumes ``[batch, channels, depth, height, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3, 4)))


class ClassTokenViT(nn.Module):
    """ViT that classifies by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls = nn.Conv2d(1, 8, 4, 4), nn.Parameter(0.1 * torch.randn(1, 1, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(h), -1, -1), h], 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


class Stages(nn.Module):
    """CNN of three stages, each a ``Sequential`` in a ``Sequential``."""

    def __init__(self) -> None:
        super().__init__()

        def stage(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

        self.stages = nn.Sequential(stage(1, 4), stage(4, 4), stage(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Case(NamedTuple):
    """Network to grow in a test: constructor, input batch, seeds, and a function that selects a tensor of the
    output."""

    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    seeds: tuple[tuple[str, str], ...]
    """Slot and blueprint of each planted seed."""
    tensor: Callable[[Any], Tensor] = lambda output: output


def images(size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, 1, size, size)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


ENCODER = "encoder.layers."


def pair_of_images(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1, size, size), torch.randn(4, 1, size, size)


CASES: dict[str, Case] = {
    "resnet": Case(
        ResNet, images(), (("layer2", "conv_light"), ("stem", "norm"), ("layer1.0.conv2", "attention"))
    ),
    "resnet-copy": Case(ResNet, images(), (("layer2", "stack"), ("layer1", "bottleneck"))),
    "vgg": Case(
        VGG, images(), (("features.1", "depthwise"), ("features", "conv_small"), ("classifier.2", "mlp"))
    ),
    "mobilenet": Case(MobileNet, images(), (("features.1", "conv_heavy"), ("features", "stack"))),
    "unet": Case(UNet, images(), (("mid", "conv_light"), ("inc", "conv_small"))),
    "vit": Case(
        ViT,
        images(),
        (
            (f"{ENCODER}0", "stack"),
            (f"{ENCODER}1", "attention"),
            (f"{ENCODER}0.linear1", "mlp_small"),
            (f"{ENCODER}0.dropout", "norm"),
            (f"{ENCODER}1.norm2", "lora"),
        ),
    ),
    "vit-time-first": Case(
        lambda: ViT(batch_first=False),
        images(),
        ((f"{ENCODER}1", "flex_attention"), (f"{ENCODER}0", "stack")),
    ),
    "signals": Case(Signals, lambda: torch.randn(4, 3, 9), (("conv", "mlp"), ("down", "attention"))),
    "padding mask": Case(TextEncoder, padded, ((f"{ENCODER}0", "mlp"), (f"{ENCODER}1.linear2", "lora"))),
    "gpt": Case(
        GPT,
        lambda: torch.randint(11, (4, 6)),
        (("h.0", "attention"), ("h.1", "stack"), ("ln_f", "mlp")),
        lambda output: output[0],
    ),
    "mlp": Case(mlp, lambda: torch.randn(4, 5), (("1", "mlp"), ("2", "norm"))),
    "gru": Case(GRUNet, lambda: torch.randn(4, 5, 3), (("rnn", "mlp_small"),)),
    "gru-time-first": Case(lambda: GRUNet(False), lambda: torch.randn(4, 5, 3), (("rnn", "attention"),)),
    "two inputs": Case(
        TwoInputs,
        lambda: (torch.randn(4, 1, 8, 8), torch.randn(4, 5)),
        (("image", "conv_light"), ("joint", "mlp"), ("table", "norm")),
    ),
    "dict": Case(
        DictNet,
        lambda: {"x": torch.randn(4, 5)},
        (("encoder", "mlp"), ("middle:z", "mlp_small")),
        lambda output: output["logits"],
    ),
    "channels last": Case(
        WindowNet,
        images(),
        (("blocks.0", "conv_light"), ("blocks.1.mlp.0", "bottleneck"), ("norm", "attention")),
    ),
    "channels last copy": Case(WindowNet, images(), (("blocks.0", "stack"), ("blocks.1", "conv_small"))),
    "siamese": Case(
        Siamese, pair_of_images, (("encoder.1", "conv_light"), ("encoder.2", "stack"), ("encoder.0", "norm"))
    ),
    "volumes": Case(
        Volumes, lambda: torch.randn(4, 1, 4, 6, 8), (("conv1", "conv_light"), ("conv2", "conv_small"))
    ),
    "class token": Case(ClassTokenViT, images(), (("blocks.0", "attention"), ("blocks.1", "mlp"))),
    "stages": Case(Stages, images(), (("stages.2", "stack"), ("stages.1", "conv_light"))),
}


# --- one more block ---------------------------------------------------------------------------------------

WORDS, WIDTH = 11, 8


class NamedBlock(nn.Module):
    """Pre-norm transformer block that takes its position scale by name and returns a tuple."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, *, scale: Tensor) -> tuple[Tensor, int]:
        query, key, value = (self.qkv(self.ln1(h)) * scale).chunk(3, -1)
        h = h + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return h + self.down(F.gelu(self.up(self.ln2(h)))), self.layer_idx


class OneBlock(nn.Module):
    """Causal language model with tied embeddings; its forward counts blocks by the attribute ``n_layer``."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.n_layer = blocks
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(NamedBlock(i) for i in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for index in range(self.n_layer):
            h, _ = self.blocks[index](h, scale=self.scale)
        return self.head(self.norm(h))


# --- wider layers -----------------------------------------------------------------------------------------


class GatedMLP(nn.Module):
    """Gated MLP on vectors, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class PlainCNN(nn.Module):
    """Three convolutions, of which the second consumes and provides hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv3, self.head = nn.Conv2d(6, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = self.conv3(F.relu(self.norm(self.conv2(h))))
        return self.head(F.relu(h).mean((2, 3)))
