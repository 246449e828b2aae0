"""Blocks that cannot be copied inside their container are refused with one sentence, and nothing changes."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from esper import Growth
from esper.leyline.errors import BlueprintError
from tests.growth.hf_families import EXPERTS, FAMILIES, FOUR, GPT, HEADS, LLAMA, Family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X = torch.linspace(-1, 1, 12).view(3, 4)


class Block(nn.Module):
    def __init__(self, width: int = 4, out: int = 4) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.out(self.norm(x))) + (x if self.out.out_features == x.shape[-1] else 0)


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Indexed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](self.blocks[0](x))))


class Sliced(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:3]:
            x = block(x)
        return self.head(self.blocks[0](x))


class Scaled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) / len(self.blocks)
        return self.head(x)


class Weighted(Stack):
    """Every block has a row in a parameter of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.5, 0.6, 0.7]))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.scales[number] * block(x)
        return self.head(x)


class SharedWeight(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].out.weight = self.blocks[2].out.weight


class SharedModule(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].out = self.blocks[2].out


class Widening(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[2], self.head = Block(4, 6), Block(6, 6), nn.Linear(6, 2)


class Patched(Stack):
    """Network with a block whose forward was replaced by a function that keeps the block."""

    def __init__(self) -> None:
        super().__init__()
        whole = self.blocks[1].forward
        self.blocks[1].forward = lambda x: 2 * whole(x)


@dataclass(frozen=True)
class FrozenSizes:
    num_layers: int = 3


class FrozenConfig(Stack):
    """Network whose forward pass counts the blocks by a configuration that cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.config = FrozenSizes()

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.config.num_layers):
            x = self.blocks[number](x)
        return self.head(x)


class TowerConfig(PreTrainedConfig):
    model_type = "tower"

    def __init__(self, height: int = 3, **known: Any) -> None:
        super().__init__(**known)
        self.height = height


class Tower(PreTrainedModel):
    """Model whose configuration counts the blocks under a name of its own."""

    config_class = TowerConfig

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block() for _ in range(config.height))
        self.head = nn.Linear(4, 2)
        self.post_init()

    forward = Stack.forward

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights of torch."""


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower(TowerConfig())


def tokens() -> dict[str, Tensor]:
    return {"input_ids": FAMILIES["llama"].sample()["input_ids"]}


def gpt2_with_inverse_scales() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**GPT, scale_attn_by_inverse_layer_idx=True))


def every_second_block_has_experts() -> nn.Module:
    settings = LLAMA | HEADS | EXPERTS | FOUR | {"decoder_sparse_step": 2}
    return Family("Qwen3MoeForCausalLM", settings, "model.layers").build()


BUILT = "differs from the .* that its configuration describes, in '{}'; from_pretrained could not read it"
REFUSED = {
    "container indexed by position": (
        Indexed,
        "blocks.1",
        "a copy of 'blocks.1' in 'blocks' runs 0 times|a copy of 'blocks.1' that changes nothing changes the",
    ),
    "container with fixed slices": (Sliced, "blocks.1", "that changes nothing changes the output"),
    "number of blocks in the forward pass": (Scaled, "blocks.1", "depends on the number of blocks"),
    "one weight per block": (
        Weighted,
        "blocks.1",
        "the forward pass fails with a copy of 'blocks.1' behind it, .*: index 3 is out of bounds",
    ),
    "weight shared by two blocks": (
        SharedWeight,
        "blocks.1",
        "'blocks.1' shares the parameter blocks.2.out.weight with another module",
    ),
    "module shared by two blocks": (SharedModule, "blocks.1", "'blocks.1' shares the parameter blocks.2.out"),
    "another output shape": (
        Widening,
        "blocks.1",
        "'blocks.1' returns features of another shape than it takes, \\(3, 6\\)",
    ),
    "replaced forward": (Patched, "blocks.1", "a copy of 'blocks.1' does not run its own layers"),
    "frozen configuration": (
        FrozenConfig,
        "blocks.1",
        "the count of blocks in 'blocks' cannot be changed: cannot assign to field 'num_layers'",
    ),
    "count under another name": (tower, "blocks.1", BUILT.format("blocks.3.norm.weight")),
    "number of the block in the forward pass of gpt2": (
        gpt2_with_inverse_scales,
        "transformer.h.1",
        BUILT.format("transformer.h.2.attn.scaling"),
    ),
    "experts in every second block": (
        every_second_block_has_experts,
        "model.layers.1",
        BUILT.format("model.layers.2.mlp.experts.gate_up_proj"),
    ),
}


def structure(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return everything that a refused copy must leave alone, apart from values of tensors."""
    config = getattr(net, "config", None)
    return [
        list(net.state_dict()),
        [(name, id(module), len(module._forward_hooks)) for name, module in net.named_modules()],
        [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        {id(p): sorted(state) for p, state in optimizer.state.items()},
        copy.deepcopy(vars(config)) if hasattr(config, "__dict__") else None,
    ]


def run(net: nn.Module, sample: Any) -> Tensor:
    """Return the output, or the logits of a model of ``transformers``."""
    return net(**sample).logits if isinstance(sample, dict) else net(sample)


@pytest.mark.parametrize("name", REFUSED)
def test_block_that_cannot_be_copied_is_refused_and_the_network_is_unchanged(name: str) -> None:
    build, slot, message = REFUSED[name]
    net = build().eval()
    sample = X if hasattr(net, "blocks") else tokens()
    optimizer = torch.optim.AdamW(net.parameters())
    run(net, sample).sum().backward()
    optimizer.step()
    before, config = run(net, sample), structure(net, optimizer)[-1]
    values = [value.clone() for value in net.state_dict().values()]
    growth = Growth(net, optimizer, sample=sample, slots=[slot], mode="min", controller=None)
    planted = structure(net, optimizer)
    with pytest.raises(BlueprintError, match=message) as error:
        growth.germinate(slot, "stack")

    assert "\n" not in str(error.value)
    assert str(error.value).count(". ") == 0
    assert structure(net, optimizer) == planted
    assert planted[-1] == config
    assert torch.equal(run(net, sample), before)
    assert all(map(torch.equal, net.state_dict().values(), values))
    growth.finish()
    assert list(net.state_dict()) == list(build().state_dict())


class Sizes:
    """Configuration in the style of minimal GPT implementations."""

    def __init__(self) -> None:
        self.n_layer, self.block_size, self.layer_sizes = 3, 3, [4, 4, 4]


class Configured(Stack):
    """Network of three blocks with a configuration that also has other sizes equal to three."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.block_size = Sizes(), 3


def test_configuration_of_a_users_network_counts_the_new_block() -> None:
    net = Configured()
    growth = Growth(net, None, sample=X, slots="auto", mode="min", controller=None)
    growth.germinate("blocks.1", "stack")

    assert vars(net.config) == {"n_layer": 4, "block_size": 3, "layer_sizes": [4, 4, 4, 4]}
    assert net.block_size == 3
    growth.prune("blocks.1")
    assert vars(net.config) == vars(Sizes())


def test_frozen_configuration_that_the_forward_pass_does_not_read_is_left_as_it_is() -> None:
    net = Stack()
    net.config = FrozenSizes()
    growth = Growth(net, None, sample=X, slots="auto", mode="min", controller=None)
    growth.germinate("blocks.1", "stack")

    assert len(net.blocks) == 4
    assert net.config.num_layers == 3
