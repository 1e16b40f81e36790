"""The import hook of `integrations.attach`."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from spottrain.integrations.attach import _Finder


def test_a_hook_is_called_once_for_its_module_and_not_for_others_of_the_same_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All modules of a zip file have one loader."""
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        archive.writestr("hooked_one.py", "import hooked_other\n")
        archive.writestr("hooked_other.py", "")
        archive.writestr("hooked_third.py", "")
    called: list[ModuleType] = []
    monkeypatch.syspath_prepend(tmp_path / "library.zip")
    monkeypatch.setattr(sys, "meta_path", [_Finder({"hooked_one": called.append}), *sys.meta_path])
    for name in ("hooked_one", "hooked_other", "hooked_third"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.util.find_spec("hooked_one")
    module = importlib.import_module("hooked_one")
    third = importlib.import_module("hooked_third")
    assert called == [module]
    assert type(module.__loader__) is type(third.__loader__)
