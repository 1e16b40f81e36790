"""Utilisation by NVML: sampled beside the training, which it never disturbs."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from spottrain.diagnostics.gpu_monitor import GPUMonitor, GPUSample, reader

CPU = torch.device("cpu")


def test_samples_are_kept_until_it_is_closed() -> None:
    taken = threading.Event()
    values = iter([GPUSample(utilisation=0.0, memory=0.2), GPUSample(utilisation=1.0, memory=0.4)])
    told: list[GPUSample] = []

    def read() -> GPUSample:
        try:
            return next(values)
        except StopIteration:
            taken.set()
            raise RuntimeError("the driver is gone") from None

    sampler = GPUMonitor(CPU, every=0.001, read=read, on_sample=told.append)
    assert taken.wait(10)
    assert sampler.busy == (0.0, 1.0)
    assert told[-1] == GPUSample(utilisation=0.5, memory=0.4)
    sampler.close()


class ByHand(GPUMonitor):
    """Its thread does nothing: time and samples are the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[GPUSample] = []
        super().__init__(CPU, every=1.0, on_sample=self.told.append, clock=lambda: self.now)

    def sample(self, *utilisations: float) -> None:
        for each in utilisations:
            self.now += 1.0
            self._take(GPUSample(utilisation=each, memory=0.5))


def test_what_was_before_the_training_or_between_two_steps_is_none_of_its_utilisation() -> None:
    sampler = ByHand()
    sampler.sample(*[0.0] * 60)
    sampler.now += 0.5
    sampler.restart()
    sampler.now -= 0.5
    sampler.sample(0.3)  # half of its second was before
    assert not sampler.busy
    sampler.sample(1.0, 1.0, 0.6)
    assert sampler.busy == (1.0, 1.0, 0.6)


def test_what_is_told_is_a_mean_of_all_that_the_gpu_did() -> None:
    sampler = ByHand()
    sampler.sample(*[0.0] * 15, *[1.0] * 5)
    assert sampler.told[-1].utilisation == pytest.approx(5 / 15) and sampler.told[-1].memory == 0.5


def test_what_fails_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = threading.Event()

    def read() -> GPUSample:
        told.set()
        raise PermissionError("no access to NVML")

    sampler = GPUMonitor(CPU, every=0.001, read=read)
    assert told.wait(10)
    for thread in threading.enumerate():
        if thread.name == "spottrain-nvml":
            thread.join(10)
    out = capsys.readouterr().out
    assert out.count("event=utilisation-not-sampled") == 1 and "no access to NVML" in out
    assert sampler.busy == ()


def test_a_cpu_has_no_samples_and_no_thread() -> None:
    sampler = GPUMonitor(CPU)
    assert sampler.busy == ()
    assert not [each for each in threading.enumerate() if each.name == "spottrain-nvml"]


def test_the_gpu_is_asked_for_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is another one for NVML where CUDA_VISIBLE_DEVICES hides some."""
    asked: list[str] = []

    def handle(uuid: str) -> str:
        asked.append(uuid)
        return uuid

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=73),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1, total=4),
    )
    properties = SimpleNamespace(uuid="1b2c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert reader(torch.device("cuda"), nvml)() == GPUSample(utilisation=0.73, memory=0.25)
    assert asked == ["GPU-1b2c"]
