"""What becomes of manifests in the shapes of upstream examples: Jobs, PyTorchJobs, TrainJobs (bench/shapes).

Each goes through `spottrain init`. Whether a value was lost without a word is found from outside, by no rule
of the converter: each value of the source is changed in turn. Where neither the TrainingJob nor what is said
of it changes with it, that value was lost in silence. A real API server with our CRD, and the operator's own
rules, must take each result.

Then an unchanged script goes to a cluster of process nodes, loses its node once, and its model comes to a
folder (bench/to_model.py): commands and seconds.

The last line is JSON: manifests, values, silent_losses, named_losses, without_any_loss, without_silent_loss,
accepted, commands, seconds, attempts, steps_lost, files, from_pretrained.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from spottrain_cli import manifests
from spottrain_cli.errors import CommandError
from spottrain_cli.migrate.convert import Converted, Wishes, convert
from spottrain_operator.api.validation import parse_spec
from spottrain_operator.errors import InvalidSpec

from bench import to_model

Json = dict[str, Any]
Path_ = tuple[str | int, ...]

SHAPES: Final = Path(__file__).with_name("shapes")
CRD: Final = Path(__file__).resolve().parents[1] / "crds" / "trainingjobs.yaml"
OF_SERVER: Final = frozenset(
    {
        "status",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "managedFields",
        "manager",
        "time",
    }
)
OF_CONTROLLER: Final = ("controller-uid", "job-name", "last-applied-configuration", "trainer.kubeflow.org/")
"""Parts of keys that the source's controller or kubectl writes, or that only tell its objects apart."""


def files() -> list[Path]:
    return sorted(SHAPES.glob("*.yaml"))


def silent(documents: list[Json], wishes: Wishes) -> list[str]:
    """Returns the paths of the values that change nothing in what is written."""
    written = _written(documents, wishes)
    return [
        f"{documents[at]['kind']}: {'.'.join(map(str, path))}"
        for at, path in values(documents)
        if _written(_changed(documents, at, path), wishes) == written
    ]


def values(documents: list[Json]) -> Iterator[tuple[int, Path_]]:
    """Yields where each value is that a person has written, by its document and path."""
    for at, document in enumerate(documents):
        for path in _leaves(document, ()):
            runtimes_own = (
                "TrainingRuntime" in document["kind"] and path[0] == "metadata" and path[-1] != "name"
            )
            if not (_of_others(path) or runtimes_own):
                yield at, path


def accepted(converted: Converted) -> str:
    """Returns why the operator would refuse it; "" where it would not."""
    try:
        parse_spec(converted.manifest["spec"])
    except InvalidSpec as error:
        return str(error)
    return ""


def _of_others(path: Path_) -> bool:
    words = [str(word) for word in path]
    if words[-1] == "name" and words[-3:-2] in (["replicatedJobs"], ["dependsOn"], ["targetJobs"]):
        return True
    return bool(OF_SERVER & set(words)) or any(part in word for word in words for part in OF_CONTROLLER)


def _written(documents: list[Json], wishes: Wishes) -> str:
    try:
        return repr(convert(documents, wishes))
    except CommandError as error:
        return str(error)


def _changed(documents: list[Json], at: int, path: Path_) -> list[Json]:
    changed = copy.deepcopy(documents)
    inside: Any = changed[at]
    for word in path[:-1]:
        inside = inside[word]
    value = inside[path[-1]]
    inside[path[-1]] = (
        not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}x"
    )
    return changed


def _leaves(value: Any, path: Path_) -> Iterator[Path_]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _leaves(inner, (*path, key))
    if not isinstance(value, dict | list) and value is not None:
        yield path


def by_api_server(found: list[Converted]) -> list[str]:
    """Returns what a real API server says against them, one by one; "" where it takes one."""
    from localcluster import layout
    from localcluster.apiserver import api_server, ensure_programs
    from localcluster.binaries import API_PROGRAMS

    from tests.api.kube import Kube, Refused

    ensure_programs(layout.default_paths(), API_PROGRAMS)
    said = []
    with api_server(programs=layout.default_paths().bin) as running:
        kube = Kube.from_kubeconfig(running.kubeconfig)
        kube.install(CRD)
        for each in found:
            body = copy.deepcopy(each.manifest)
            body["metadata"].pop("namespace", None)
            try:
                kube.create_job("default", body, query="fieldValidation=Strict&dryRun=All")
                said.append("")
            except Refused as refused:
                said.append(str(refused))
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes-only", action="store_true", help="without the script and its cluster")
    shapes_only = parser.parse_args().shapes_only
    read = [manifests.read(str(file)) for file in files()]
    found = [convert(documents, Wishes()) for documents in read]
    lost = [silent(documents, Wishes()) for documents in read]
    answers = by_api_server(found)
    refused = [answer or accepted(each) for answer, each in zip(answers, found, strict=True)]
    for file, each, gone, why in zip(files(), found, lost, refused, strict=True):
        print(f"{file.stem:32} {len(each.losses)} losses named, {len(gone)} silent  {why or 'accepted'}")
        for path in gone:
            print(f"    silent: {path}")
    record = {
        "manifests": len(found),
        "values": sum(1 for documents in read for _ in values(documents)),
        "silent_losses": sum(map(len, lost)),
        "named_losses": sum(len(each.losses) for each in found),
        "without_any_loss": sum(not each.losses for each in found),
        "without_silent_loss": sum(not each for each in lost),
        "accepted": sum(not why for why in refused),
    }
    good = record["without_silent_loss"] == record["accepted"] == record["manifests"]
    if not shapes_only:
        record |= to_model.figures()
        good = good and bool(record["from_pretrained"])
    print(json.dumps(record))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
