"""What every training of another library must do, played by each vehicle: a library and a way to use it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import spottrain
from spottrain.checkpoint.final_weights import digest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import Lab
from tests.runs.launched import Run
from tests.runs.test_series import series_of
from tests.support.zygote import Zygote

LOADS = "load_state_dict(spottrain.load_weights(os.environ['BASE'] + '/final'))"
FILE = "store/final/model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Vehicle:
    """`script` signals itself at step `STOP` (rank 1 of two), and waits in step `HOLD` until it is killed."""

    script: str
    steps: int
    loading: str = ""
    """The script with `LOADS` of its model: it reads another run's weights itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, str] = field(default_factory=dict)
    """Environment for two ranks."""


def preloading(*modules: str) -> Any:
    """A fixture: the zygote of a file, which has imported these for all of its runs."""

    @pytest.fixture(scope="module")
    def zygote(zygote: Zygote) -> Iterator[Zygote]:
        child = zygote.child(*modules)
        yield child
        child.close()

    return zygote


def base_of(script: str) -> Any:
    """A fixture: the checkpoint folder of a run of the script that is done."""

    @pytest.fixture(scope="module")
    def base(others: Lab) -> Path:
        others.run(script, at="base", attempt=1, interval="1h").done()
        return others.folder / "base"

    return base


def stopped_at(lab: Lab, script: str, step: int, *, at: str = "store", env: Mapping[str, str]) -> Run:
    """Attempt 1, which saves only at the signal in step `step`."""
    run = lab.run(script, at=at, attempt=1, interval="1h", env={**env, "STOP": str(step)})
    return run.ends(ExitCode.INTERRUPTED)


def stopped_and_killed(lab: Lab, vehicle: Vehicle, plain: Run, env: Mapping[str, str], last: str = "") -> Run:
    """A notice and a kill cost no step and change no bit of `plain`. Returns the attempt that ends it.

    `env`: of the first two attempts; `last`: a folder that is removed after the first one.
    """
    env = {**vehicle.env, **env}
    first = stopped_at(lab, vehicle.script, 7, env=env)
    assert first.message.outcome is Outcome.INTERRUPTED and first.message.totalSteps == vehicle.steps
    assert first.message.durableStep == first.message.step == 7
    if last:
        shutil.rmtree(last)
    second = lab.run(vehicle.script, attempt=2, interval="3steps", env={**env, "HOLD": "13"})
    second.until("event=committed", "holding").killed()
    third = lab.run(vehicle.script, attempt=3, env=dict(vehicle.env)).done()
    assert min(second.losses) == 8 and min(third.losses) > 8
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest == digest(spottrain.load_weights(lab.folder / FILE))
    steps = [point.step for series in series_of(lab.folder / "store") for point in series.points]
    assert steps == sorted(set(steps)) and {*first.losses, *third.losses} <= {*steps} <= {*plain.losses}
    assert third.message.outputURI and not list(lab.folder.glob(".spottrain-*")), "nothing is left behind"
    return third


def begins_from_other_weights_and_goes_on(lab: Lab, vehicle: Vehicle, base: Path) -> Run:
    """As if the script had loaded the weights, over a notice and a kill. Only the first start reads them."""
    copy = str(shutil.copytree(base, lab.folder / "base"))
    env = dict(vehicle.env)
    plain = lab.run(vehicle.loading, at="plain", attempt=1, env=env | {"BASE": copy}).done()
    last = stopped_and_killed(lab, vehicle, plain, env | {Env.INIT_FROM: copy}, last=copy)
    logs = [(lab.folder / f"run-{number}.log").read_text() for number in (2, 3, 4)]
    assert [log.count("event=initialized") for log in logs] == [1, 0, 0]
    return last


def two_ranks_begin_from_other_weights_and_go_on(lab: Lab, vehicle: Vehicle, base: Path) -> None:
    """They stop after the same step, and all of them resume."""
    env = dict(vehicle.env) | dict(vehicle.ranks)
    begin = env | {Env.INIT_FROM: str(base)}
    loading = env | {"BASE": str(base)}
    plain = lab.run(vehicle.loading, nproc=2, at="plain", attempt=1, env=loading).done(300)
    first = lab.run(vehicle.script, nproc=2, attempt=1, env=begin | {"STOP": "5"})
    first.ends(ExitCode.INTERRUPTED, 300)
    second = lab.run(vehicle.script, nproc=2, attempt=2, env=begin).done(300)
    assert second.digest == plain.digest and min(second.losses) == max(first.losses) + 1
