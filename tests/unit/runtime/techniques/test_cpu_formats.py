"""A run that asks for bf16 or fp16 on a CPU that is slow in it says so; a fast one is left alone."""

from __future__ import annotations

import re

import pytest
import torch
from spottrain.techniques import cpu_formats
from spottrain.techniques.precision import DeviceFacts, advise_library, choose

CPU = torch.device("cpu")
HERE = DeviceFacts(type="cpu", name="CPU")
GPU = DeviceFacts(type="cuda", name="V100", bf16=False, tf32=False)


def never(name: str) -> float:
    raise AssertionError(f"{name} was measured")


@pytest.mark.parametrize(
    ("wanted", "ratio", "words"),
    [
        (
            "bf16",
            59.3,
            r"bf16 take 59 times .*measured on one core.*auto, which is fp32 here.*times_slower=59.3",
        ),
        ("bf16", 1.5, "bf16 take 1.5 times"),
        ("fp16", 12.0, "fp16 take 12 times .*set precision to auto"),
    ],
)
def test_a_slow_format_is_used_and_told_with_the_measured_ratio(
    wanted: str, ratio: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(wanted, CPU, HERE, slowdown=lambda name: {wanted: ratio}[name]).name == wanted
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "about=precision" in each]
    assert re.search(words, line), line


def test_a_fast_format_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    choose("bf16", CPU, HERE, slowdown=lambda name: 1.4)
    assert "advice" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "facts"), [("auto", HERE), ("fp32", HERE), ("tf32", HERE), ("bf16", GPU), ("fp16", GPU)]
)
def test_only_formats_that_a_cpu_may_be_slow_in_are_measured(wanted: str, facts: DeviceFacts) -> None:
    choose(wanted, CPU, facts, slowdown=never)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("16-mixed", "fp16")],
)
def test_a_librarys_name_of_a_format_is_understood(
    name: str, measured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advise_library(name, CPU, f"leave {name} out", lambda of: {measured: 9.0}[of])
    assert re.search(f"products in {measured} take 9.0 times .*leave {name} out", capsys.readouterr().out)
    advise_library(name, torch.device("cuda"), "", never)


@pytest.mark.parametrize("name", ["", "no", "32-true", "64-true", "fp8"])
def test_other_names_of_a_library_are_not_measured(name: str) -> None:
    advise_library(name, CPU, "", never)


@pytest.mark.parametrize("name", sorted(cpu_formats.FORMATS))
def test_measuring_leaves_threads_and_random_numbers_as_they_were(name: str) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_formats.slowdown.__wrapped__(name) > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
