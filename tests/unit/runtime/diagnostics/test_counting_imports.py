"""Counting a step's work costs a run on a CPU no import of Dynamo or Triton, which take seconds."""

from __future__ import annotations

import pytest
import torch

from tests.support.fresh import Fresh

COUNTED = """
import sys, torch
from spottrain.diagnostics.flops import counted
model = torch.nn.Linear(8, 8)
with counted() as work:
    model(torch.ones(2, 8)).sum().backward()
assert work.flops == 2 * (2 * 2 * 8 * 8)
assert not {"torch._dynamo", "triton"} & sys.modules.keys()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU Triton's kernels are counted too")
def test_counting_on_a_cpu_imports_neither_dynamo_nor_triton(fresh: Fresh) -> None:
    fresh.run(COUNTED, seconds=120)
