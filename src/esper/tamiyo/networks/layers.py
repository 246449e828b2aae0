"""Initialised layers of the policy network: orthogonal linear layers, perceptrons, and an LSTM."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

MEMORY_STEPS: Final = 64
"""Longest memory of an LSTM cell at initialisation, in steps: T_max of the chrono initialisation."""


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialise a linear layer orthogonally (Saxe et al. 2014) with ``gain``."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _chrono_init(bias: Tensor, hidden: int) -> None:
    """Set the biases of the LSTM gates by chrono initialisation (Tallec & Ollivier 2018).

    Forget-gate biases are b_f ~ log U(1, T_max − 1), input-gate biases −b_f. LSTM cells then start with
    memories of 1 to ``MEMORY_STEPS`` steps. With the usual forget-gate bias of 1 an LSTM cell keeps 1e-7 of
    its content after 50 steps, which is too little for a gradient (ADR 0013).
    """
    span = torch.empty(hidden).uniform_(1.0, MEMORY_STEPS - 1.0).log()
    bias[:hidden] = -span
    bias[hidden : 2 * hidden] = span


def make_lstm(inputs: int, hidden: int) -> nn.LSTM:
    """Return an LSTM with orthogonal weights and chrono-initialised gate biases."""
    lstm = nn.LSTM(inputs, hidden, batch_first=True)
    for name, parameter in lstm.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
        if name == "bias_ih_l0":
            _chrono_init(parameter.data, hidden)
    return lstm


def make_mlp(inputs: int, hidden: tuple[int, ...], outputs: int, last_gain: float) -> nn.Sequential:
    """Return a multilayer perceptron with ReLU; its last layer is initialised with gain ``last_gain``."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [orthogonal(nn.Linear(inputs, width), math.sqrt(2)), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, orthogonal(nn.Linear(inputs, outputs), last_gain))
