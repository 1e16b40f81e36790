"""`spottrain checkpoints download`: writes a model to a local folder. It reads the store, and claims nothing.

FOLDER.part    grows file by file; the same command goes on where it was cut off. It is FOLDER/.part if there
               is an empty FOLDER already, which may be a mount
FOLDER         appears, or is filled, when all is there
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from spottrain.checkpoint.manifest import Damaged
from spottrain.cli.output import Answer
from spottrain.core.log_format import counted
from spottrain.storage.base import Store

from spottrain_cli.checkpoints import synced
from spottrain_cli.checkpoints.items import Item
from spottrain_cli.checkpoints.model import ADAPTER, CONFIG, Model, damaged, find
from spottrain_cli.checkpoints.source import Source
from spottrain_cli.errors import CommandError, UsageError
from spottrain_cli.figures import size
from spottrain_cli.output import console

RECORD: Final = ".spottrain-download.json"
"""File of the folder that says what it was downloaded from."""
SAFETENSORS: Final = "model.safetensors"
PT: Final = "model.pt"
SAFETENSORS_FORM: Final = "safetensors"
PT_FORM: Final = "pt"
PART: Final = ".part"
OnBytes = Callable[[int], object]


FORMS: Final = (SAFETENSORS_FORM, PT_FORM)
"""Of the weights."""


def run(source: Source, which: str, target: Path, form: str) -> Answer:
    """Downloads what `which` names (see `model.find`), with a progress bar in a terminal."""
    model = find(source.store, which, source.job)
    target = target if target.name else Path(os.path.abspath(target))  # of a dot
    with _progress(model) as on_bytes:
        return download(source.store, model, target, form, on_bytes)


@contextlib.contextmanager
def _progress(model: Model) -> Iterator[OnBytes]:
    if not sys.stderr.isatty() or not model.items:
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(model.of, total=sum(item.bytes for item in model.items))
        yield lambda count: bar.advance(task, count)


def download(store: Store, model: Model, target: Path, form: str, on_bytes: OnBytes) -> Answer:
    """Writes the model to `target`. `on_bytes` gets the number of bytes of each piece that is there.

    Raises:
        UsageError: The folder has other files, or cannot be written.
        CheckpointError: What the store has is damaged.
    """
    try:
        if model.folder is not None:
            return _synced(store, model, target, form)
        record = {"uri": store.uri, "of": model.key, "format": form}
        if not _is_there(target, record):
            _require_free(target)
            _fill(model, target, record, form, on_bytes)
    except Damaged as error:
        raise damaged(model.of, store, error) from error
    except OSError as error:
        raise UsageError(
            f"{error.filename or target} cannot be written: {error.strerror or error}"
        ) from error
    return _answer(model, target)


def _answer(model: Model, target: Path) -> Answer:
    files = json.loads((target / RECORD).read_text())["files"]
    total = sum(files.values())
    lines = [f"{target}: {model.of}, {counted(len(files), 'file')}, {size(total)}"]
    lines += [each for each in (_how_to_load(target, files), model.note) if each]
    facts = {
        "folder": str(target),
        "of": model.of,
        "step": model.step,
        "bytes": total,
        "files": sorted(files),
    }
    return Answer(facts=facts, lines=lines)


def _how_to_load(target: Path, files: dict[str, int]) -> str:
    if PT in files:
        return f'Load it by torch.load("{target / PT}").'
    if ADAPTER in files:
        return f'Load it by peft.AutoPeftModel.from_pretrained("{target}").'
    if CONFIG in files:
        return f'Load it by transformers.{_class_of(target / CONFIG)}.from_pretrained("{target}").'
    return f'Load it by spottrain.load_weights("{target}").' if SAFETENSORS in files else ""


def _class_of(config: Path) -> str:
    try:
        return str(json.loads(config.read_bytes())["architectures"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        return "AutoModel"


# --- the folder -------------------------------------------------------------------------------------------
def _require_free(target: Path) -> None:
    if target.is_dir() and not {each.name for each in target.iterdir()} <= {PART, "lost+found"}:
        raise UsageError(f"{target} has other files, and nothing is overwritten: name another folder")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: name a folder")


def _is_there(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the folder is this download, complete."""
    try:
        known = json.loads((folder / RECORD).read_text())
        files = known.pop("files")
        return known == record and all((folder / name).stat().st_size == n for name, n in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fill(model: Model, target: Path, record: dict[str, Any], form: str, on_bytes: OnBytes) -> None:
    filled = target.is_dir()
    part = target / PART if filled else target.with_name(target.name + PART)
    with _begun(part, record):
        _require_room(part, model)
        for item in model.items:
            _write(item, _place(part, item.name), on_bytes)
        if form == PT_FORM:
            _convert(part)
        files = {
            path.relative_to(part).as_posix(): path.stat().st_size
            for path in sorted(part.rglob("*"))
            if path.is_file() and path.name != RECORD
        }
        _write_record(part, record | {"files": files})
        if not filled:
            part.rename(target)
            return
        for path in sorted(part.iterdir(), key=lambda each: each.name == RECORD):
            path.rename(target / path.name)
        part.rmdir()


@contextlib.contextmanager
def _begun(part: Path, record: dict[str, Any]) -> Iterator[None]:
    """Makes the folder, or goes on with it if it is of the same download. One process at a time."""
    part.mkdir(parents=True, exist_ok=True)
    with (part / RECORD).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{part} is being written by another download: wait for it") from None
        file.seek(0)
        known = file.read()
        if known != json.dumps(record):
            if not known and len(list(part.iterdir())) > 1:
                raise UsageError(
                    f"{part} has other files, and is needed for the download: name another folder"
                )
            for path in part.iterdir():
                if path.name != RECORD:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            _write_record(part, record)
        yield


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(record))


def _require_room(part: Path, model: Model) -> None:
    there = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
    missing = sum(item.bytes for item in model.items) - there - shutil.disk_usage(part).free
    if missing > 0:
        raise UsageError(
            f"there is no room in {part.parent}: {size(missing)} more are needed; name another folder"
        )


def _place(part: Path, name: str) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise Damaged(f"it has a file named {name}, which is outside its folder")
    return part / path


def _write(item: Item, place: Path, on_bytes: OnBytes) -> None:
    """Writes a file, which has its name only once its contents are verified."""
    if place.is_file() and place.stat().st_size == item.bytes:
        on_bytes(item.bytes)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    growing = place.with_name(place.name + PART)
    with growing.open("wb") as file:
        for count in item.write(file):
            on_bytes(count)
        file.flush()
        os.fsync(file.fileno())
    growing.rename(place)


def _convert(part: Path) -> None:
    """Replaces the files of weights by one that torch.load reads."""
    weights = [path for path in sorted(part.glob("*.safetensors"))]
    if not weights:
        there = ", ".join(sorted(path.name for path in part.iterdir() if path.name != RECORD))
        raise CommandError(
            f"there are no safetensors files to convert to {PT}, only {there}: leave out --format"
        )
    try:
        from spottrain.checkpoint.weights_files import write_torch_file
    except ModuleNotFoundError as error:
        raise UsageError(f"--format pt needs PyTorch ({error}): pip install torch") from error
    write_torch_file(weights, part / PT)
    for path in [*weights, *part.glob("*.safetensors.index.json")]:
        path.unlink()


# --- a folder of `spottrain sync` -------------------------------------------------------------------------
def _synced(store: Store, model: Model, target: Path, form: str) -> Answer:
    assert model.folder is not None
    if form == PT_FORM:
        raise UsageError("--format pt: the script wrote this folder itself, and it is downloaded as it is")
    _require_free(target)
    entry, folder = model.folder
    return synced.write(store, entry, folder, target)
