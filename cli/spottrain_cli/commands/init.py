"""`spottrain init FILE`: the manifest of a TrainingJob, from a job of another kind or from a script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spottrain_cli.errors import UsageError

if TYPE_CHECKING:
    from spottrain_cli.migrate.convert import Converted

HELP = """Write the manifest of a TrainingJob from a Job, PyTorchJob or TrainJob, or from a script.

Every field of the file is carried, or named with what to do instead. What cannot be carried is a loss:
exit code 1, and nothing is written, unless --accept-losses.

\b
  spottrain init job.yaml -o trainingjob.yaml
  kubectl get pytorchjob mnist -o yaml | spottrain init - --bucket s3://my-bucket/runs
  spottrain init job.yaml --bucket s3://my-bucket/runs --sync-path /checkpoints
  spottrain init train.py --image registry.example.com/team/train:1 --gpus 1 --bucket s3://my-bucket/runs
"""


def init(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A manifest, - for standard input, or a script.")
    ],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="Default: standard output.")
    ] = "",
    name: Annotated[
        str, typer.Option(help="Name of the TrainingJob. Default: that of the job or script.")
    ] = "",
    image: Annotated[str, typer.Option(help="Image of the container that trains.")] = "",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each worker, for a script.")] = 1,
    bucket: Annotated[
        str, typer.Option(metavar="URI", help="Where the runtime keeps checkpoints, below NAMESPACE/NAME.")
    ] = "",
    sync_path: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="The script writes its own checkpoints there; a sidecar keeps them."
        ),
    ] = "",
    spot: Annotated[
        bool | None,
        typer.Option("--spot/--on-demand", help="Which nodes. Default: as the file says, else spot."),
    ] = None,
    accept_losses: Annotated[
        bool, typer.Option("--accept-losses", help="Write the manifest although something is lost.")
    ] = False,
) -> None:
    from spottrain_cli import manifests
    from spottrain_cli.migrate import text
    from spottrain_cli.migrate.convert import Wishes, convert

    if sync_path and not bucket:
        raise UsageError("--sync-path needs --bucket, where the sidecar keeps the folder")
    if file.endswith(".py"):
        written = _of_script(file, name, image, gpus, bucket, sync_path, spot)
    else:
        capacity = "" if spot is None else "Spot" if spot else "OnDemand"
        wishes = Wishes(name=name, image=image, checkpoints=bucket, sync_path=sync_path, capacity=capacity)
        converted = convert(manifests.read(file), wishes)
        _say(converted)
        if converted.losses and not accept_losses:
            number = len(converted.losses)
            what = "1 thing is" if number == 1 else f"{number} things are"
            print(
                f"spottrain: {what} lost, so nothing is written; --accept-losses writes it", file=sys.stderr
            )
            raise typer.Exit(1)
        written = text.manifest(converted)
    _write(written, output)


def _of_script(
    file: str, name: str, image: str, gpus: int, bucket: str, sync_path: str, spot: bool | None
) -> str:
    from spottrain_cli.migrate import text
    from spottrain_cli.submit import survival
    from spottrain_cli.submit.script import Script, manifest

    if Path(file).is_file():
        found = survival.of_files(file)
        print(f"note: {found}", file=sys.stderr)
    print(
        f"note: the image must have {file}; `spottrain submit {file}` brings it along instead",
        file=sys.stderr,
    )
    script = Script(
        path=file,
        name=name,
        image=image,
        gpus=gpus,
        bucket=bucket,
        sync_path=sync_path,
        spot=spot is not False,
    )
    return text.dump(manifest(script))


def _say(converted: Converted) -> None:
    for note in converted.notes:
        print(f"{'lost' if note.lost else 'note'}: {note}", file=sys.stderr)


def _write(written: str, output: str) -> None:
    if not output:
        print(written, end="")
        return
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(written)
    except FileExistsError:
        raise UsageError(f"{output} exists; name another file, or remove it") from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    print(f"{output} is written; `spottrain submit {output}` sends it", file=sys.stderr)
