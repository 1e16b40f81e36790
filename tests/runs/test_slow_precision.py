"""A training in bf16 on a processor whose libraries have no fast bf16 says how slow that is."""

from __future__ import annotations

import json
import platform
import re

import pytest

from tests.runs.conftest import Lab

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""With these torch computes as on a processor without AVX-512 and AMX."""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variables are for x86")
def test_bf16_that_is_slow_here_is_told_before_the_first_step(lab: Lab) -> None:
    it = lab.run(training=json.dumps({"precision": "bf16"}), env=AVX2).done()
    said = re.search(r"matrix products in bf16 take ([\d.]+) times as long as in fp32", it.log)
    assert said and float(said[1]) >= 1.5
    assert it.log.index("about=precision") < it.log.index(" step=1/")
