"""Reads a checkpoint of format 2 (docs/checkpoint-format.md) with numpy alone."""

import hashlib
import json
import pathlib
from typing import Any

import numpy


def read(folder: str | pathlib.Path) -> dict[str, Any]:
    """The model's tensors by name, each byte checked; of kind `state`, for types that numpy knows."""
    folder = pathlib.Path(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    said = manifest.pop("sha256")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert manifest["format"] == 2 and hashlib.sha256(text).hexdigest() == said
    files = {}
    for shard in manifest["shards"]:
        body = files[shard["name"]] = (folder / shard["name"]).read_bytes()
        unit = manifest["chunkBytes"]
        chunks = [body[at : at + unit] for at in range(0, len(body), unit)]
        assert [hashlib.sha256(chunk).hexdigest() for chunk in chunks] == shard["chunks"]
    tensors = []
    for stored in manifest["tensors"]:
        whole = numpy.empty(stored["shape"], stored["dtype"])
        for piece in stored["pieces"]:
            count = int(numpy.prod(piece["shape"], dtype=int))
            box = numpy.frombuffer(files[piece["shard"]], stored["dtype"], count, piece["offset"])
            where = tuple(slice(a, a + n) for a, n in zip(piece["start"], piece["shape"], strict=True))
            whole[where] = box.reshape(piece["shape"])
        tensors.append(whole)
    model = manifest["tree"]["model"]
    return {
        name: tensors[x["$tensor"]] for name, x in model.items() if isinstance(x, dict) and "$tensor" in x
    }
