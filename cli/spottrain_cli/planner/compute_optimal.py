"""Model size and training tokens for a compute budget.

C = 6 N D: a token costs 6 FLOPs per parameter, 2 forward and 4 backward (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). Attention's own products are left out; `transformer` counts them.

Two answers are shown side by side, because they are of different quality:
- 20 tokens per parameter, the rule of thumb from approaches 1 and 2 of Hoffmann et al. 2022
  (arXiv:2203.15556). N = sqrt(C / 120).
- The parametric loss L(N, D) = E + A / N^a + B / D^b, as fitted to Hoffmann's data again by Besiroglu et al.
  2024 (arXiv:2404.10102). The coefficients printed in Hoffmann's approach 3 contradict approaches 1 and 2.

Both optimize the training alone. A model that will serve many requests should be smaller and see more tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

FLOPS_PER_PARAMETER_AND_TOKEN: Final = 6
TOKENS_PER_PARAMETER: Final = 20
E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
"""Besiroglu et al. 2024, equation 4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A model size and the tokens that it is trained on."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @property
    def loss(self) -> float:
        """Nats per token of Hoffmann's data that the parametric fit expects; only differences mean much."""
        return float(E + A / self.parameters**ALPHA + B / self.tokens**BETA)


def rule_of_thumb(flops: float) -> Allocation:
    """Returns the allocation with 20 tokens per parameter for a budget in FLOPs."""
    parameters = math.sqrt(flops / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return Allocation(parameters=parameters, tokens=TOKENS_PER_PARAMETER * parameters)


def least_loss(flops: float) -> Allocation:
    """Returns the allocation with the least parametric loss for a budget in FLOPs."""
    product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
    scale = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    parameters = scale * product ** (BETA / (ALPHA + BETA))
    return Allocation(parameters=parameters, tokens=product / parameters)
