"""GPUs: arithmetic, memory and interconnect, by the vendors' data sheets.

FLOP/s are dense, without the factor 2 of structured sparsity that many sheets print. `planner` plans with
them, `diagnostics.flops` computes the MFU and rooflines from them. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class GPU:
    """A GPU model."""

    pattern: str
    """Matches `torch.cuda.get_device_name()`; the first GPU that does counts."""
    flops: Mapping[str, float]
    """Peak FLOP/s by number format."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: float
    """Bytes."""
    link: float
    """Bytes/s to another GPU of the node in one direction: NVLink or Infinity Fabric, else PCIe."""
    source: str

    @property
    def precision(self) -> str:
        """The 16-bit number format to train in: bf16, or fp16 where the GPU has no bf16."""
        return "bf16" if "bf16" in self.flops else "fp16"


def _gpu(pattern: str, memory: float, bandwidth: float, link: float, source: str, **teraflops: float) -> GPU:
    """`memory` in GiB that the driver reports where that is known, `bandwidth` and `link` in GB/s."""
    return GPU(
        pattern=pattern,
        flops={name: value * 1e12 for name, value in teraflops.items()},
        bandwidth=bandwidth * 1e9,
        memory=memory * 2**30,
        link=link * 1e9,
        source=source,
    )


_A100 = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H100 = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
_H100_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}
_A100_SHEET, _V100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet", "NVIDIA V100 Tensor Core GPU datasheet"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper; bandwidth: its datasheet"
_H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet; FLOP/s with the digits of the H100's whitepaper"
_L4, _L40S = "NVIDIA L4 Tensor Core GPU datasheet", "NVIDIA L40S GPU datasheet"
_A10_SHEET, _A10G_SHEET = "NVIDIA A10 Tensor Core GPU datasheet", "NVIDIA A10G datasheet, as of AWS G5"
_B200 = "NVIDIA HGX B200 datasheet, as of github.com/stas00/ml-engineering compute/accelerator @744d01e1"
_MI300X = (
    "AMD Instinct MI300X datasheet, as of github.com/stas00/ml-engineering compute/accelerator @744d01e1. "
    "Its link is the sum of seven: one pair of GPUs gets 64 GB/s"
)
PCIE3, PCIE4, PCIE5 = 16.0, 32.0, 64.0
"""GB/s of 16 lanes in one direction."""
GPUS: Final = {
    # "\b" keeps an L40S from matching L4, and "$" keeps a slice of a virtual GPU ("A10-8Q") from matching
    # the whole one. Left out, because figures differ or are unknown: H100 with HBM2 or HBM2e (the name does
    # not say PCIe or SXM), A100 with 64 GB (Leonardo), and the low-power V100 FHHL.
    "MI300X": _gpu(
        r"\bMI300X\b", 178.8, 5300, 448, _MI300X, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4
    ),
    "B200": _gpu(r"\bB200\b", 179.1, 8000, 900, _B200, fp32=80, tf32=1125, bf16=2250, fp16=2250),
    "H200-NVL": _gpu(r"\bH200 NVL\b", 140.4, 4800, 450, "NVIDIA H200 datasheet", **_H100_NVL),
    "H200": _gpu(r"\bH200\b", 140.4, 4800, 450, _H200_SHEET, **_H100),
    "H100-PCIe": _gpu(
        r"\bH100 PCIe\b", 74.5, 2000, PCIE5, _H100_PAPER, fp32=51.2, tf32=378, bf16=756, fp16=756
    ),
    "H100-NVL": _gpu(r"\bH100 NVL\b", 93.58, 3900, 300, _H100_SHEET, **_H100_NVL),
    "H100": _gpu(r"\bH100\b(?!.*HBM2)", 79.65, 3350, 450, _H100_PAPER, **_H100),
    "A100-80GB-PCIe": _gpu(r"\bA100.80GB PCIe\b", 80, 1935, PCIE4, _A100_SHEET, **_A100),
    "A100-80GB": _gpu(r"\bA100.*80GB\b", 80, 2039, 300, _A100_SHEET, **_A100),
    "A100-40GB": _gpu(r"\bA100\b(?!.*64GB)", 40, 1555, 300, _A100_SHEET, **_A100),
    "A10": _gpu(r"\bA10$", 22.49, 600, PCIE4, _A10_SHEET, fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    "A10G": _gpu(r"\bA10G\b", 22.49, 600, PCIE4, _A10G_SHEET, fp32=31.5, tf32=35, bf16=70, fp16=70),
    "L40S": _gpu(r"\bL40S$", 44.99, 864, PCIE4, _L40S, fp32=91.6, tf32=183, bf16=362, fp16=362),
    "L4": _gpu(r"\bL4\b", 22.49, 300, PCIE4, _L4, fp32=30.3, tf32=60, bf16=121, fp16=121),
    "T4": _gpu(r"\bT4\b", 15, 320, PCIE3, "NVIDIA T4 Tensor Core GPU datasheet", fp32=8.1, fp16=65),
    "V100-PCIe": _gpu(r"\bV100-PCIE\b", 15.78, 900, PCIE3, _V100_SHEET, fp32=14, fp16=112),
    "V100-32GB": _gpu(r"\bV100-(SXM|DGXS).*32GB", 29.8, 900, 150, _V100_SHEET, fp32=15.7, fp16=125),
    "V100-16GB": _gpu(r"\bV100-(SXM|DGXS)", 15.78, 900, 150, _V100_SHEET, fp32=15.7, fp16=125),
}


def known_gpu(name: str) -> GPU | None:
    """Returns the GPU of that device name; None for an unknown one, and for a MIG slice of unknown share."""
    if "MIG" in name:
        return None
    return next((gpu for gpu in GPUS.values() if re.search(gpu.pattern, name)), None)
