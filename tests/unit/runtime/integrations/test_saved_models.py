"""Which files of a folder are the model that a script has saved there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spottrain.integrations.saved_models import SavedModels
from spottrain.lifecycle.life import Phase


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def session(**more: Any) -> Any:
    usual = {"phase": Phase.STORED, "born": time.time() - 60, "world": SimpleNamespace(first=True)}
    return SimpleNamespace(**usual | more)


def saving(saved: SavedModels, *names: str) -> Callable[..., None]:
    def save(save_directory: Path | None = None, state: Any = None) -> None:
        put(Path(save_directory or "."), *names)

    return saved.noting(save, "save_directory")


def test_it_is_what_the_save_wrote_and_what_lies_beside_it_since_the_start(tmp_path: Path) -> None:
    put(tmp_path, "tokenizer.json")
    saved = SavedModels(session())
    assert saved.files() == {}
    saving(saved, "model.safetensors", "1_Pooling/config.json", "checkpoint-5/optimizer.pt", "runs/x")(
        tmp_path
    )
    assert set(saved.files()) == {"tokenizer.json", "model.safetensors", "1_Pooling/config.json"}


def test_files_of_before_the_start_are_no_part_of_it_nor_subfolders_of_before_the_save(
    tmp_path: Path,
) -> None:
    put(tmp_path, "data.bin", "data/samples.bin")
    later = time.time() + 60
    for born, found in ((later, set()), (later - 120, {"data.bin"})):
        saved = SavedModels(session(born=born))
        saved.note(tmp_path, began=later)
        assert set(saved.files()) == found


def test_several_folders_keep_their_places_below_the_one_that_has_all_of_them(tmp_path: Path) -> None:
    saved = SavedModels(session())
    save = saving(saved, "model.safetensors")
    save(tmp_path / "out/adapter")
    save(save_directory=tmp_path / "out/merged")
    assert set(saved.files()) == {"adapter/model.safetensors", "merged/model.safetensors"}


def test_a_checkpoint_uri_in_the_folder_is_no_part_of_the_model(tmp_path: Path) -> None:
    saved = SavedModels(session())
    saving(saved, "model.safetensors", "store/HEAD", "store/final/model.safetensors")(tmp_path)
    assert set(saved.files()) == {"model.safetensors"}


def test_other_ranks_and_a_save_before_the_training_note_nothing(tmp_path: Path) -> None:
    for state in (session(world=SimpleNamespace(first=False)), session(phase=Phase.STARTING)):
        saved = SavedModels(state)
        saving(saved, "model.safetensors")(tmp_path)
        assert saved.files() == {}
