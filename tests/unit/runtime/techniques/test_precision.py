"""A number format that the device is good at, and the order of things in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spottrain.techniques.precision import Amp, DeviceFacts, Precision, choose, facts_of

from tests.support.fresh import Fresh
from tests.support.sentences import Told

CPU = torch.device("cpu")


DEVICES = {
    "H200": DeviceFacts(type="cuda", name="H200", bf16=True),
    "V100": DeviceFacts(type="cuda", name="V100"),
    "CPU": DeviceFacts(type="cpu", name="CPU"),
}


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True


# --- which format ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("device", "name"), [("H200", "bf16"), ("V100", "fp16"), ("CPU", "fp32")])
def test_auto_is_what_the_device_has_in_hardware(device: str, name: str, capsys: Any) -> None:
    assert choose("auto", CPU, DEVICES[device]).name == name
    assert f"chosen={name}" in capsys.readouterr().out


@pytest.mark.parametrize(("wanted", "device"), [("bf16", "V100"), ("tf32", "CPU"), ("fp32", "H200")])
def test_a_format_that_is_named_is_taken_on_any_device(wanted: str, device: str) -> None:
    assert choose(wanted, CPU, DEVICES[device]).name == wanted


def test_an_unknown_format_is_refused_with_those_that_there_are(told: Told) -> None:
    told(lambda: choose("int8", CPU, DEVICES["CPU"]))


def test_of_a_cpu_nothing_is_known_so_that_auto_is_the_same_format_on_every_one() -> None:
    assert facts_of(CPU) == DeviceFacts(type="cpu", name="cpu")


@pytest.mark.parametrize(("hip", "major", "bf16"), [(None, 8, True), (None, 7, False), ("7.1", 0, True)])
def test_torch_is_asked_for_bf16_in_hardware_and_for_that_gpu(
    hip: str | None, major: int, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []

    def enter(device: torch.device) -> AbstractContextManager[None]:
        current.append(device)
        return nullcontext()

    wanted = torch.device("cuda", 1)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: wanted)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert facts_of(wanted) == DeviceFacts(type="cuda", name="a GPU", bf16=bf16)
    assert current == [wanted], "torch answers for the current device"


# --- TF32 -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("tf32", True)])
def test_the_old_flags_and_the_new_ones_agree(name: str, allowed: bool) -> None:
    Precision(name=name).apply()
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is allowed
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if allowed else "ieee")
    assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")


@pytest.mark.parametrize("name", ["fp32", "tf32"])
def test_flags_that_a_script_left_in_conflict_are_put_right(name: str, told: Told) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError) as refused:
        _ = torch.backends.cuda.matmul.allow_tf32
    told(refused)
    Precision(name=name).apply()
    assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")


def test_convolutions_have_the_chosen_format_whatever_was_set_for_all_backends(fresh: Fresh) -> None:
    """In processes of their own: a setting of all backends is the process's."""
    code = """
import os, torch
from spottrain.techniques.precision import Precision
cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
for above in (torch.backends, cudnn):
    for name in ("fp32", "tf32"):
        if os.fork() == 0:
            above.fp32_precision = "tf32"
            Precision(name=name).apply()
            kinds = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision
            print("found", name, *kinds, cudnn.allow_tf32, matmul.allow_tf32, flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
"""
    found = [line for line in fresh.run(code).splitlines() if line.startswith("found")]
    assert found == ["found fp32 ieee ieee ieee False False", "found tf32 tf32 tf32 tf32 True True"] * 2


def test_a_setting_of_the_script_that_is_overridden_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_float32_matmul_precision("high")
    Precision(name="fp32").apply()
    assert "event=override" in (out := capsys.readouterr().out) and "script=tf32" in out
    Precision(name="fp32").apply()
    assert "override" not in capsys.readouterr().out


def test_bf16_leaves_the_rest_as_the_script_has_it() -> None:
    torch.set_float32_matmul_precision("high")
    Precision(name="bf16", dtype=torch.bfloat16).apply()
    assert torch.get_float32_matmul_precision() == "high"


# --- the step of a loop of one's own --------------------------------------------------------------------
class Scene:
    """One weight at 0, SGD with rate 1: after a step the weight is the gradient that was applied."""

    def __init__(self, name: str) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.amp = Amp(choose(name, CPU, DEVICES["CPU"]), CPU)

    def step(self, gradient: float, **options: Any) -> bool:
        self.amp.backward(self.weight * -gradient)
        return self.amp.step(self.optimizer, scheduler=self.scheduler, **options)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_the_limit_on_gradients_is_one_on_their_true_size(name: str) -> None:
    scene = Scene(name)
    assert scene.step(0.5, clip_grad_norm=1.0)
    assert scene.weight.item() == pytest.approx(0.5), "below the limit; scaled it would be far above"
    scene.step(40.0, clip_grad_norm=1.0)
    assert scene.weight.item() == pytest.approx(0.5 + 0.5 * 1.0)
    assert scene.weight.grad is None


def test_the_scheduler_steps_with_the_optimizer() -> None:
    scene = Scene("bf16")
    rates = []
    for _ in range(3):
        rates.append(scene.scheduler.get_last_lr()[0])
        scene.step(1.0)
    assert rates == [1.0, 0.5, 0.25]


def test_a_step_that_overflowed_moves_neither_weights_nor_scheduler() -> None:
    scene = Scene("fp16")
    scene.step(1.0)
    before = scene.amp.state_dict()["scale"]
    assert scene.step(float("inf")) is False
    assert scene.weight.item() == 1.0 and scene.scheduler.get_last_lr() == [0.5]
    assert scene.amp.state_dict()["scale"] == before / 2


def test_named_parameters_are_clipped_together_beyond_those_of_the_optimizer() -> None:
    scene = Scene("fp32")
    other = torch.nn.Parameter(torch.zeros(()))
    scene.amp.backward(-(3 * scene.weight + 4 * other))
    scene.amp.step(scene.optimizer, [scene.weight, other], clip_grad_norm=1.0)
    assert scene.weight.item() == pytest.approx(0.6)


class Two(Scene):
    """Two optimizers of one loss, and a loss scale that changes with every step."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.amp.scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16", growth_interval=1)
        self.other = torch.nn.Parameter(torch.zeros(()))
        self.second = torch.optim.SGD([self.other], lr=1.0)

    def both(self, first: float, second: float, **options: Any) -> bool:
        self.amp.backward(-(first * self.weight + second * self.other))
        return self.amp.step([self.optimizer, self.second], scheduler=[self.scheduler], **options)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_two_optimizers_of_one_backward_pass_step_by_true_gradients(name: str) -> None:
    scene = Two(name)
    assert scene.both(3.0, 4.0)
    assert (scene.weight.item(), scene.other.item()) == (3.0, 4.0)
    assert scene.scheduler.get_last_lr() == [0.5]
    assert scene.weight.grad is None and scene.other.grad is None
    scene.both(6.0, 8.0, clip_grad_norm=1.0)
    assert scene.weight.item() == pytest.approx(3.0 + 0.5 * 0.6), "clipped together"
    assert scene.other.item() == pytest.approx(4.8)


def test_where_one_of_two_overflowed_the_other_moves_and_no_scheduler() -> None:
    scene = Two("fp16")
    scale = scene.amp.scaler.get_scale()
    assert scene.both(1.0, float("inf")) is False
    assert (scene.weight.item(), scene.other.item()) == (1.0, 0.0)
    assert scene.scheduler.get_last_lr() == [1.0] and scene.amp.scaler.get_scale() == scale / 2


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_a_loop_with_a_backward_pass_of_its_own_steps_as_it_likes(name: str) -> None:
    scene = Two(name)
    for _ in range(2):
        loss = -(scene.weight + scene.other)
        scene.amp.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        assert scene.amp.step(scene.optimizer)
    assert scene.weight.item() == 2.0


def test_a_second_step_after_one_backward_pass_is_refused(told: Told) -> None:
    scene = Two("fp16")
    scene.step(1.0)
    told(lambda: scene.amp.step(scene.second))
    assert scene.step(1.0), "after another it is none"


def test_the_loss_scale_goes_on_where_it_was() -> None:
    before, after = Scene("fp16"), Scene("fp16")
    before.step(float("inf"))
    after.amp.load_state_dict(before.amp.state_dict())
    assert after.amp.scaler.get_scale() == before.amp.scaler.get_scale() == 32768.0


def test_a_state_without_scale_is_taken_by_fp16_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    state = Scene("bf16").amp.state_dict()
    assert state == {}
    scene = Scene("fp16")
    scene.amp.load_state_dict(state)
    assert "event=loss-scale source=initial" in capsys.readouterr().out
    Scene("bf16").amp.load_state_dict(Scene("fp16").amp.state_dict())


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_forward_pass_computes_in_it_and_weights_stay_fp32(name: str, dtype: torch.dtype) -> None:
    amp = Amp(choose(name, CPU, DEVICES["CPU"]), CPU)
    layer = torch.nn.Linear(2, 2)
    with amp.autocast():
        assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
