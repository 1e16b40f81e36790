"""Parameters and FLOPs of a decoder or encoder transformer, and shapes of known models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from spottrain.errors import ConfigurationError

from spottrain_cli.planner.compute_optimal import FLOPS_PER_PARAMETER_AND_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """The shape of a transformer."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    """Tokens of one sample."""
    feed_forward: int = 0
    """Width of the MLP's hidden layer; 0: four times `hidden`."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    gated: bool = False
    """Whether the MLP has a gate (SwiGLU): three matrices instead of two."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    positions: int = 0
    """Learned position embeddings; 0: none, as with RoPE."""
    token_types: int = 0
    """Learned segment embeddings (BERT)."""
    biases: bool = True
    """Whether linear layers have biases and norms a shift: LayerNorm instead of RMSNorm."""
    embedding_norm: bool = False
    """Whether the embedding is normed, and the head has a layer of its own (BERT)."""
    dropout: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigurationError(f"hidden {self.hidden} is not a multiple of the heads {self.heads}")
        if self.heads % self.key_value_heads:
            raise ConfigurationError(f"heads {self.heads} is not a multiple of kv heads {self.kv_heads}")

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def key_value_width(self) -> int:
        return self.hidden // self.heads * self.key_value_heads

    @property
    def mlp_width(self) -> int:
        return self.feed_forward or 4 * self.hidden

    @property
    def parameters_per_layer(self) -> int:
        hidden, kv, mlp = self.hidden, self.key_value_width, self.mlp_width
        weights = 2 * hidden * hidden + 2 * hidden * kv + (3 if self.gated else 2) * hidden * mlp
        norms = 2 * hidden * (2 if self.biases else 1)
        biases = (2 * hidden + 2 * kv + mlp + hidden) if self.biases else 0
        return weights + norms + biases

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included."""
        hidden = self.hidden
        tables = (self.vocabulary * (1 if self.tied else 2) + self.positions + self.token_types) * hidden
        norm = hidden * (2 if self.biases else 1)
        head = (hidden * hidden + 3 * hidden + self.vocabulary) if self.embedding_norm else 0
        return self.layers * self.parameters_per_layer + tables + norm + head

    @property
    def flops_per_token(self) -> float:
        """FLOPs of training on one token: forward and backward, without recomputation.

        6 per parameter that is multiplied (an embedding that is only looked up is not), and 12 L h s for the
        products of attention, as PaLM counts them (arXiv:2204.02311, appendix B): without the half that a
        causal mask could save.
        """
        looked_up = self.positions + self.token_types + (0 if self.tied else self.vocabulary)
        multiplied = self.parameters - looked_up * self.hidden
        return FLOPS_PER_PARAMETER_AND_TOKEN * multiplied + 12 * self.layers * self.hidden * self.sequence


_GPT2 = "openai-community/gpt2 config.json"
_BERT = "google-bert/bert-base-uncased config.json"
_LLAMA2, _LLAMA3 = "Touvron et al. 2023, arXiv:2307.09288", "Dubey et al. 2024, arXiv:2407.21783, table 3"
MODELS: Final = {
    "gpt2": Transformer(
        layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024, positions=1024,
        dropout=True, source=_GPT2,
    ),
    "bert-base": Transformer(
        layers=12, hidden=768, heads=12, vocabulary=30522, sequence=512, positions=512, token_types=2,
        embedding_norm=True, dropout=True, source=_BERT,
    ),
    "llama-2-7b": Transformer(
        layers=32, hidden=4096, heads=32, vocabulary=32000, sequence=4096, feed_forward=11008, gated=True,
        tied=False, biases=False, source=_LLAMA2,
    ),
    "llama-3-8b": Transformer(
        layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=128256, sequence=8192, feed_forward=14336,
        gated=True, tied=False, biases=False, source=_LLAMA3,
    ),
    "llama-3-70b": Transformer(
        layers=80, hidden=8192, heads=64, kv_heads=8, vocabulary=128256, sequence=8192, feed_forward=28672,
        gated=True, tied=False, biases=False, source=_LLAMA3,
    ),
}  # fmt: skip
