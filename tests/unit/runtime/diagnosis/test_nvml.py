"""Utilisation by NVML: sampled beside the training, which it never disturbs."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from spottrain.diagnosis.nvml import Sample, Sampler, reader

CPU = torch.device("cpu")


def test_samples_are_kept_until_it_is_closed() -> None:
    taken = threading.Event()
    values = iter([Sample(utilisation=0.0, memory=0.2), Sample(utilisation=1.0, memory=0.4)])

    def read() -> Sample:
        try:
            return next(values)
        except StopIteration:
            taken.set()
            raise RuntimeError("the driver is gone") from None

    sampler = Sampler(CPU, every=0.001, read=read)
    assert taken.wait(10)
    assert (sampler.utilisation, sampler.memory) == (0.5, 0.4)
    sampler.close()


def test_what_fails_is_told_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = threading.Event()

    def read() -> Sample:
        told.set()
        raise PermissionError("no access to NVML")

    sampler = Sampler(CPU, every=0.001, read=read)
    assert told.wait(10)
    for thread in threading.enumerate():
        if thread.name == "spottrain-nvml":
            thread.join(10)
    out = capsys.readouterr().out
    assert out.count("event=utilisation-not-sampled") == 1 and "no access to NVML" in out
    assert (sampler.samples, sampler.utilisation, sampler.memory) == ((), None, None)


def test_a_cpu_has_no_samples_and_no_thread() -> None:
    sampler = Sampler(CPU)
    assert sampler.utilisation is None
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
    assert reader(torch.device("cuda"), nvml)() == Sample(utilisation=0.73, memory=0.25)
    assert asked == ["GPU-1b2c"]
