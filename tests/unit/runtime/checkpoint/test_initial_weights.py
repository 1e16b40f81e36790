"""Weights of another run that change while they are read, files that lie, and models that cannot be set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spottrain.checkpoint.final_files import FinalFiles
from spottrain.checkpoint.final_weights import FinalWeights
from spottrain.checkpoint.initial_weights import InitialWeights
from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.weights_files import SafetensorsFile, files_in, local_body
from spottrain.core.run_config import InitFrom
from spottrain.distributed.control_channel import ControlChannel
from spottrain.distributed.world import World
from spottrain.errors import CheckpointError, StoreDenied
from spottrain.storage.outage import Outage

from tests.support.sentences import Told
from tests.unit.runtime.checkpoint.test_saves import Faulty, attempt


class Changing(Faulty):
    """Calls `act` once, before the first bytes of weights are read."""

    act: Callable[[], object] | None = None

    def read_into(self, key: str, offset: int, *buffers: memoryview, hashed: bool = False) -> str:
        if offset + sum(each.nbytes for each in buffers) > 1000 and self.act is not None:
            act, self.act = self.act, None
            act()
        return super().read_into(key, offset, *buffers, hashed=hashed)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 3))


def filled(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(each, value) for name, each in model().state_dict().items()}


def base(folder: Path) -> tuple[CheckpointManager, Changing]:
    store = Changing(folder, {})
    it = attempt(store, 1)
    it.claim()
    return it, store


def save(it: CheckpointManager, step: int) -> None:
    it.save_now(lambda: it.saver.snapshot({"model": filled(float(step))}, {}, step))


def load(store: Changing, into: torch.nn.Module, *ignore: str) -> dict[str, Any]:
    given = InitFrom(source="s3://bucket/base", ignore=ignore)
    return InitialWeights(
        given, world=World(), control=ControlChannel(World()), folder=Path(), open_store=lambda uri: store
    ).load(into)


def values(of: torch.nn.Module) -> set[float]:
    return {float(each) for p in of.state_dict().values() for each in p.flatten()}


# --- another run, while it goes on ------------------------------------------------------------------------
def test_a_checkpoint_that_is_deleted_while_it_is_read_gives_way_to_the_newest(tmp_path: Path) -> None:
    it, store = base(tmp_path)
    save(it, 5)

    def go_on() -> None:
        for step in (6, 7, 8):  # three are kept
            save(it, step)

    store.act = go_on
    record = load(store, here := model())
    assert values(here) == {8.0} and record["step"] == 8
    it.release()


def test_final_weights_that_are_written_again_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    it, store = base(tmp_path)
    save(it, 5)
    it.write_final(FinalWeights(filled(50.0)), 5)
    it.release(done=True)
    later = FinalFiles(store, Outage())

    def again() -> None:
        later.write(FinalWeights(filled(60.0)), (), {"step": 6, "checkpoint": ""})

    store.act = again
    record = load(store, here := model())
    assert values(here) == {60.0} and record["step"] == 6


def test_what_a_store_refuses_names_the_setting(tmp_path: Path, told: Told) -> None:
    it, store = base(tmp_path)
    save(it, 5)

    def refuse() -> None:
        raise StoreDenied("access to s3://bucket/base is denied")

    store.act = refuse
    told(lambda: load(store, model()))
    it.release()


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path, told: Told) -> None:
    it, store = base(tmp_path)
    told(lambda: load(store, model()))
    it.release()


# --- models ---------------------------------------------------------------------------------------------
class Computes(torch.nn.Linear):
    def state_dict(self, *args: Any, **more: Any) -> Any:
        found = super().state_dict(*args, **more)
        return {name: each * 1 for name, each in found.items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2, device="meta"),
        lambda: torch.nn.LazyLinear(2),
        lambda: Computes(2, 2),
        lambda: torch.nn.Linear(3, 2),
    ],
    ids=["meta", "lazy", "computes", "another shape"],
)
def test_a_model_that_cannot_be_set_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[], torch.nn.Module], told: Told
) -> None:
    it, store = base(tmp_path)
    it.save_now(
        lambda: it.saver.snapshot({"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, {}, 1)
    )
    here = make()
    with pytest.raises(CheckpointError) as refused:
        load(store, here)
    it.release()
    told(refused)


def test_tied_weights_need_one_of_their_names(tmp_path: Path, told: Told) -> None:
    it, store = base(tmp_path)
    found = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "1.bias": torch.ones(2)}
    it.save_now(lambda: it.saver.snapshot({"model": found}, {}, 1))
    here = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    told(lambda: load(store, here))
    here[1].weight = here[0].weight
    load(store, here)
    assert values(here) == {1.0}
    it.release()


# --- files ----------------------------------------------------------------------------------------------
def file_of(path: Path, header: Any, body: bytes = b"") -> SafetensorsFile:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return SafetensorsFile(local_body(path))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32"},
        7,
    ],
)
def test_a_header_that_lies_is_damage(tmp_path: Path, entry: Any, told: Told) -> None:
    told(lambda: file_of(tmp_path / "a.safetensors", {"w": entry}, bytes(8)))


@pytest.mark.parametrize("body", [b"", b"short", (2**60).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_no_safetensors_file(tmp_path: Path, body: bytes, told: Told) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(body)
    told(lambda: SafetensorsFile(local_body(path)))


def test_an_adapter_beside_the_weights_of_a_whole_model_is_not_one_of_its_files(tmp_path: Path) -> None:
    whole, adapter = (tmp_path / f"{name}.safetensors" for name in ("model", "adapter_model"))
    adapter.touch()
    assert files_in(tmp_path) == [adapter]
    whole.touch()
    assert files_in(tmp_path) == [whole]


def test_tensors_that_are_not_aligned_and_empty_ones_are_read(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1, 2], "data_offsets": [1, 9]},
        "c": {"dtype": "F32", "shape": [0, 2], "data_offsets": [9, 9]},
    }
    body = bytes([7]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    found = file_of(tmp_path / "a.safetensors", header, body).read(header)
    assert {name: each.tolist() for name, each in found.items()} == {"a": 7, "b": [[1.5, -2.0]], "c": []}
