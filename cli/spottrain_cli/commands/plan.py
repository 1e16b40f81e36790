"""`spottrain plan QUESTION`: the options of each question, which spottrain_cli.planner answers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal

import typer
from spottrain.core.gpu_catalogue import GPUS

from spottrain_cli.output import Format, FormatOption
from spottrain_cli.planner import memory
from spottrain_cli.planner.transformer import MODELS
from spottrain_cli.planner.values import amount, byte_rate, lever, mfu, seconds, share, whole

app = typer.Typer(
    help="Say what a training needs and costs, before it runs. Needs no cluster and no torch.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class Flag:
    kind: Any
    """Reads its text; a tuple: the choices; bool: it has no text; [reader]: it may be repeated."""
    help: str
    metavar: str | None = None
    default: Any = None

    def parameter(self, name: str, *, required: bool) -> inspect.Parameter:
        kind, option = self._typed()
        default = inspect.Parameter.empty if required else self.default
        given = typer.Option(f"--{name}", help=self.help, **option)
        annotation: Any = Annotated[kind if required else kind | None, given]
        return inspect.Parameter(
            name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    def _typed(self) -> tuple[Any, dict[str, Any]]:
        if self.kind is bool:
            return bool, {}
        if isinstance(self.kind, tuple):
            return Literal[self.kind], {}
        if isinstance(self.kind, list):
            return list[str], {"parser": self.kind[0], "metavar": self.metavar}
        return str, {"parser": self.kind, "metavar": self.metavar}


FLAGS: Final[dict[str, Flag]] = {
    # money and compute
    "flops": Flag(amount, "Compute budget, such as 1e21.", "C"),
    "tokens": Flag(amount, "Tokens of the whole training, such as 500B.", "D"),
    "budget": Flag(amount, "Money, such as 50k.", "DOLLARS"),
    "price": Flag(amount, "Dollars per GPU-hour.", "DOLLARS"),
    "gpu": Flag(str, f"One of {', '.join(GPUS)}.", "NAME"),
    "gpus": Flag(whole, "GPUs in all.", "N", "1"),
    "mfu": Flag(
        [mfu], "Model FLOP/s over peak FLOP/s, such as 0.4, or H100=0.4; may be repeated.", "[GPU=]SHARE"
    ),
    "instance": Flag(str, "Instance type whose price counts, such as p4d.24xlarge.", "TYPE"),
    "spot": Flag(bool, "The spot price instead of the on-demand price.", default=False),
    "goodput": Flag(share, "Useful share of the paid time; 1: no interruption.", "SHARE", "1"),
    # the model
    "params": Flag(amount, "Parameters, such as 7B.", "N"),
    "model": Flag(str, f"A known shape: {', '.join(MODELS)}.", "NAME"),
    "layers": Flag(whole, "Transformer layers.", "N"),
    "hidden": Flag(whole, "Width.", "N"),
    "heads": Flag(whole, "Attention heads.", "N"),
    "vocabulary": Flag(whole, "Tokens known.", "N"),
    "sequence": Flag(whole, "Tokens of a sample.", "N"),
    "feed-forward": Flag(whole, "Width of the MLP; default: 4 x hidden.", "N"),
    "kv-heads": Flag(whole, "Heads of keys and values; default: heads.", "N"),
    "gated": Flag(bool, "A gated MLP without biases (SwiGLU), as Llama has.", default=False),
    "untied": Flag(bool, "The output layer is not the embedding.", default=False),
    # memory and communication
    "precision": Flag(tuple(memory.ELEMENT), "Default: bf16, or fp16 where the GPU has no bf16."),
    "optimizer": Flag(tuple(memory.OPTIMIZERS), "The optimizer.", default="adamw"),
    "attention": Flag(("fused", "math"), "math keeps the s x s scores.", default="fused"),
    "nodes": Flag(whole, "Nodes.", "N", "1"),
    "step-seconds": Flag(seconds, "Compute of one optimizer step, such as 0.5s.", "TIME"),
    "samples-per-second": Flag(amount, "Throughput of one GPU alone: also answers that of all.", "N"),
    "accumulation": Flag(whole, "Micro-batches per step.", "N", "1"),
    "gradient-bytes": Flag(("4", "2"), "Per parameter; 2 where DDP or FSDP sends bf16.", default="4"),
    "link": Flag(byte_rate, "GPU to GPU, one direction; default: the catalogue's.", "RATE"),
    "network": Flag(byte_rate, "Node to node, one direction, such as 100Gbit/s.", "RATE"),
    "bandwidth": Flag(byte_rate, "One node to the store, such as 1GB/s.", "RATE"),
    # the learning rate
    "lr": Flag(amount, "The rate that is tuned for the base batch.", "RATE"),
    "base-batch": Flag(whole, "Samples per step for which it is tuned.", "N"),
    "batch": Flag(whole, "Samples of one optimizer step over all GPUs.", "N"),
    "rule": Flag(("linear", "sqrt"), "linear for SGD, sqrt for Adam.", default="sqrt"),
    "steps": Flag(whole, "Optimizer steps of the training.", "N"),
    "warmup-steps": Flag(whole, "Length of the warm-up.", "N"),
    "warmup-epochs": Flag(amount, "The same in epochs.", "N"),
    "steps-per-epoch": Flag(whole, "Needed for --warmup-epochs.", "N"),
    # hardware and levers
    "deadline": Flag(seconds, "Paid time at most, such as 72h.", "TIME"),
    "startup": Flag(seconds, "Paid before the first step: boot, image, compilation.", "TIME", "5m"),
    "cloud": Flag(("aws", "gcp", "azure"), "Default: all."),
    "max-nodes": Flag(whole, "Nodes at most.", "N", "16"),
    "top": Flag(whole, "Rows to print.", "N", "10"),
    "hours": Flag(seconds, "Paid time of a run, such as 72h.", "TIME"),
    "runs": Flag(amount, "Runs, such as those of a year; one stopped at 60% of its hours is 0.6.", "N", "1"),
    "lever": Flag(
        [lever],
        "After / before of price, hours or runs: bf16:hours=48/72, spot:price=0.36; may be repeated.",
        "[NAME:]PART=FACTOR",
    ),
}
SHAPE: Final = (
    "model", "layers", "hidden", "heads", "vocabulary", "sequence", "feed-forward", "kv-heads", "gated",
    "untied",
)  # fmt: skip
MODEL: Final = ("params", *SHAPE)


def _ask(
    name: str, answer: str, about: str, example: str, *, need: Sequence[str] = (), may: Sequence[str] = ()
) -> None:
    """Adds a question: its options, those that it needs first, and the function that answers it."""

    def question(**given: Any) -> None:
        from spottrain_cli.output import show
        from spottrain_cli.planner import questions

        output = given.pop("output")
        found = getattr(questions, answer)(SimpleNamespace(**given))
        show(found.lines, found.facts, output)

    options = [*((flag, True) for flag in need), *((flag, False) for flag in may)]
    parameters = [FLAGS[flag].parameter(flag, required=required) for flag, required in options]
    output = inspect.Parameter(
        "output", inspect.Parameter.KEYWORD_ONLY, default=Format.TEXT, annotation=FormatOption
    )
    question.__signature__ = inspect.Signature([*parameters, output])  # type: ignore[attr-defined]
    question.__annotations__ = {}
    question.__doc__ = f"{about}\n\n\b\n  spottrain plan {name} {example}"
    app.command(name)(question)


_ask(
    "compute", "compute", "Say how many parameters and tokens a budget is best spent on.",
    "--params 7B --tokens 500B",
    may=("flops", "params", "tokens", "budget", "gpu", "price", "mfu"),
)  # fmt: skip
_ask(
    "time", "time", "Say the hours and the money of a training on a number of GPUs.",
    "--model llama-3-8b --tokens 160B --gpu H100 --gpus 64 --instance p5.48xlarge",
    need=("tokens", "gpu"),
    may=("gpus", "mfu", *MODEL, "price", "instance", "spot", "goodput"),
)  # fmt: skip
_ask(
    "memory", "memory_of", "Say what a GPU holds, and the largest micro-batch, by mode.",
    "--model llama-3-8b --gpu H100 --gpus 8",
    need=("gpu",),
    may=("gpus", *SHAPE, "precision", "optimizer", "attention"),
)  # fmt: skip
_ask(
    "network", "network", "Say the seconds of the gradient exchange, the efficiency and the throughput.",
    "--params 1.3B --gpu A100-40GB --gpus 8 --step-seconds 0.04s",
    need=("gpu", "gpus", "step-seconds"),
    may=("nodes", "network", "link", *MODEL, "samples-per-second", "accumulation", "gradient-bytes"),
)  # fmt: skip
_ask(
    "checkpoint", "checkpoint_of", "Say the size of a checkpoint, and in which cloud's notice it is saved.",
    "--params 7B --nodes 2 --bandwidth 1GB/s --step-seconds 2s",
    need=("bandwidth", "step-seconds"),
    may=("nodes", *MODEL, "optimizer"),
)  # fmt: skip
_ask(
    "learning-rate", "learning_rate", "Say the learning rate for another batch size, and the warm-up.",
    "--lr 3e-4 --base-batch 256 --batch 1024 --steps 10000 --warmup-steps 500",
    need=("lr", "base-batch", "batch", "steps"),
    may=("rule", "warmup-steps", "warmup-epochs", "steps-per-epoch"),
)  # fmt: skip
_ask(
    "hardware", "choose", "Find the cheapest instances that meet a deadline or a budget.",
    "--model llama-3-8b --tokens 160B --batch 512 --deadline 20d",
    need=("tokens", "batch"),
    may=(
        "mfu", *SHAPE, "optimizer", "deadline", "budget", "spot", "goodput", "startup", "cloud", "max-nodes",
        "top",
    ),
)  # fmt: skip
_ask(
    "levers", "levers", "Say what levers on price, hours and runs bring one after the other.",
    "--price 4.10 --gpus 128 --hours 72h --lever spot:price=0.36 --lever bf16:hours=48/72",
    need=("price", "hours"),
    may=("gpus", "runs", "lever"),
)  # fmt: skip
