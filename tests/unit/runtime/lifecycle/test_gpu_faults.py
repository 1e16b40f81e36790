"""What a driver says of a GPU that has failed is told from what a script has done."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome, Reason, TerminationMessage, gpu_fault
from spottrain.core.preemption import Preemption
from spottrain.errors import PeerLost
from spottrain.lifecycle import termination_message
from spottrain.lifecycle.gpu_faults import lost_gpu
from spottrain.lifecycle.session import Session

FAULTS = [
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "Unable to determine the device handle for GPU0000:4E:00.0: GPU is lost. Reboot the system",
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "NCCL error: unhandled cuda error\nCuda failure 'uncorrectable ECC error encountered'",
]
OTHERS = [
    "CUDA error: unspecified launch failure",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "NCCL error: remote process exited or there was a network error",
    "",
]


def test_a_drivers_word_for_hardware_is_a_fault_of_the_node_and_what_a_script_can_cause_is_none() -> None:
    assert all(gpu_fault(text) in text.splitlines() for text in FAULTS)
    assert [gpu_fault(text) for text in OTHERS] == [""] * len(OTHERS)


class Nvml:
    """What is asked of pynvml; `error` is raised for the second GPU."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, error: Exception | None = None, *, hangs: threading.Event | None = None) -> None:
        self._error, self._hangs = error, hangs

    def nvmlInit(self) -> None:
        if self._hangs is not None:
            self._hangs.wait(30)

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number == 1 and self._error is not None:
            raise self._error
        return number

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 40


def test_nvml_says_that_a_gpu_is_lost() -> None:
    assert lost_gpu(Nvml(RuntimeError("GPU is lost"))) == "NVML: GPU is lost"
    assert lost_gpu(Nvml()) == ""
    assert lost_gpu(Nvml(RuntimeError("Insufficient Permissions"))) == ""


def test_a_driver_that_does_not_answer_holds_up_no_last_words() -> None:
    over = threading.Event()
    assert lost_gpu(Nvml(hangs=over), seconds=0.05) == ""
    over.set()


@pytest.mark.parametrize(("lost", "reason"), [(True, Reason.NODE_FAULT), (False, Reason.SCRIPT_FAILED)])
def test_a_launch_failure_is_a_fault_of_the_node_if_a_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool, reason: Reason
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # without it there is no GPU to ask
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(RuntimeError("GPU is lost") if lost else None))
    found = last_words(tmp_path, RuntimeError(OTHERS[0]))
    assert found.reason == reason and ("NVML: GPU is lost" in found.message) is lost


def last_words(tmp_path: Path, error: BaseException) -> TerminationMessage:
    path = tmp_path / "message"
    session = Session({str(Env.TERMINATION_MESSAGE): str(path)}, Preemption(grace=30.0))
    assert session.fail(error, "train.py") == ExitCode.FAILED
    found = TerminationMessage.from_json(path.read_text())
    assert found is not None
    return found


@pytest.mark.parametrize("outer", [None, ValueError("the step failed"), PeerLost("another rank is gone")])
def test_the_last_words_name_the_fault_whatever_error_hides_it(
    tmp_path: Path, outer: Exception | None
) -> None:
    error: Exception = RuntimeError(FAULTS[0])
    if outer is not None:
        outer.__cause__ = error
    found = last_words(tmp_path, outer or error)
    assert (found.outcome, found.reason) == (Outcome.FAILED, Reason.NODE_FAULT)
    assert "uncorrectable ECC error" in found.message and type(outer or error).__name__ in found.message


def test_the_rank_whose_gpu_has_failed_speaks_for_those_that_failed_with_it(tmp_path: Path) -> None:
    path = tmp_path / "message"
    script = TerminationMessage(outcome=Outcome.FAILED, reason=Reason.SCRIPT_FAILED, message="launch failure")
    fault = TerminationMessage(outcome=Outcome.FAILED, reason=Reason.NODE_FAULT, message="ECC")
    for message in (script, fault, script):
        termination_message.revise(path, termination_message.outranking(message), since=0)
    assert json.loads(path.read_text())["reason"] == Reason.NODE_FAULT
