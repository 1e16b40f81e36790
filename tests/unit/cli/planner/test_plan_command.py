"""`spottrain plan`: answers, and what is said about a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spottrain_cli.app import main
from spottrain_cli.commands import plan

from tests.support.sentences import Told

PAGE = Path(__file__).resolve().parents[4] / "docs" / "planning.md"


def ask(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The facts. The text is printed as well, so that it is known to work."""
    assert main(["plan", *words.split()]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert text.strip()
    assert main(["plan", *words.split(), "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_compute_takes_flops_or_a_model_or_money(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("compute --flops 1e21", capsys)["allocations"]["20 tokens per parameter"]["tokens"] > 5e10
    given = ask("compute --params 7B --tokens 500B", capsys)
    assert given["flops"] == 2.1e22 and "as given" in given["allocations"]
    money = ask("compute --budget $50k --gpu A100-40GB --price 1.22875 --mfu 0.3", capsys)
    assert money["flops"] == pytest.approx(50_000 / 9.83 * 3600 * 8 * 312e12 * 0.3)


def test_time_is_paid_for_by_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = "time --params 2.887B --tokens 57.74B --gpu A100-40GB --gpus 8 --mfu 0.3 --price 1.22875"
    assert ask(words, capsys)["dollars"] == pytest.approx(3650, rel=0.005), "and not 29,000"
    listed = ask(
        "time --model gpt2 --tokens 10B --gpu H100 --gpus 8 --mfu 0.4 --instance p5.48xlarge", capsys
    )
    assert listed["dollars"] == pytest.approx(listed["hours"] * 55.04)
    unknown = ask("time --model gpt2 --tokens 10B --gpu B200 --mfu 0.4 --instance a4-highgpu-8g", capsys)
    assert unknown["dollars"] is None and "no on-demand price" in unknown["assumptions"][-1]


def test_without_an_mfu_a_typical_one_counts_and_its_source_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    modern = ask("time --model gpt2 --tokens 10B --gpu H100", capsys)
    assert modern["hours"] == pytest.approx(
        ask("time --model gpt2 --tokens 10B --gpu H100 --mfu 0.4", capsys)["hours"]
    )
    assert any("Dubey et al. 2024" in each for each in modern["assumptions"])
    assert any(
        "V100" in each for each in ask("time --model gpt2 --tokens 10B --gpu T4", capsys)["assumptions"]
    )
    found = ask("hardware --model gpt2 --tokens 2.5B --batch 480 --deadline 48h", capsys)["options"]
    assert found and all(each["instance"]["gpu"] for each in found)


def test_memory_network_checkpoint_and_learning_rate(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ask("memory --model llama-2-7b --gpu A100-80GB --gpus 8", capsys)["modes"]
    assert [mode["largest_micro_batch"] > 0 for mode in modes.values()] == [False, False, True, True]
    words = "network --params 1.3B --gpu A100-40GB --gpus 8 --step-seconds 0.03765s --link 600GB/s"
    assert ask(words, capsys)["efficiency_without_overlap"] == pytest.approx(0.711, abs=0.001), "and latency"
    assert ask(words, capsys)["samples_per_second"] is None
    words = words.replace("600GB/s", "300GB/s")
    both = ask(f"{words} --samples-per-second 850", capsys)
    assert both["samples_per_second_ideal"] == 6800 and both["efficiency"] < 1
    assert both["samples_per_second"] == pytest.approx(6800 * both["efficiency"])
    assert main(["plan", *words.split(), "--samples-per-second", "850"]) == 0
    text = capsys.readouterr().out
    assert "samples/s, ideal" in text and "6800" in text and "samples/s, overlapped" in text
    two = ask(
        "network --params 7B --gpu H100 --gpus 16 --nodes 2 --network 200Gbit/s --step-seconds 1s", capsys
    )
    assert two["efficiency"] < 1 and "bf16" in two["advice"][0]
    fits = ask("checkpoint --params 7B --nodes 8 --bandwidth 1GB/s --step-seconds 2s", capsys)
    assert fits["bytes"] == 84e9
    assert {name: each["fits"] for name, each in fits["notices"].items()} == {
        "AWS": True,
        "Google Cloud": True,
        "GKE pods": False,
        "Azure": True,
    }
    rate = ask(
        "learning-rate --lr 3e-4 --base-batch 256 --batch 1024 --steps 1000 --warmup-steps 100", capsys
    )
    assert rate == {"learning_rate": 6e-4, "warmup_steps": 100, "assumptions": rate["assumptions"]}


def test_hardware_names_the_cheapest_and_the_runners_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "hardware --model gpt2 --tokens 2.5B --batch 480 --mfu 0.35 --mfu cpu=0.3 --deadline 48h --cloud aws"
    )
    found = ask(words, capsys)["options"]
    costs = [each["dollars"] for each in found]
    assert len(found) > 3 and costs == sorted(costs)
    assert all(each["hours"] <= 48 and each["instance"]["cloud"] == "aws" for each in found)
    assert found[0]["price"]["source"] and found[0]["price"]["date"]


TIME = "time --params 7B --tokens 1B --mfu 0.4"
NETWORK = "network --params 7B --gpu T4 --nodes 2 --step-seconds 1s"
HARDWARE = "hardware --model gpt2 --tokens 1T --batch 512 --mfu 0.4"


@pytest.mark.parametrize(
    "words",
    [
        "compute",
        f"{TIME} --gpu A9000",
        "time --params 7B --tokens 1B --gpu T4 --mfu H100=0.4",
        f"{TIME} --gpu T4 --instance p5.48xlarge",
        f"{TIME} --gpu T4 --instance p9",
        "memory --gpu T4",
        "memory --gpu T4 --layers 2 --hidden 8",
        "memory --gpu T4 --model gpt5",
        "memory --gpu T4 --model gpt2 --heads 7",
        f"{NETWORK} --gpus 3",
        f"{NETWORK} --gpus 4",
        "learning-rate --lr 1 --base-batch 1 --batch 2 --steps 5 --warmup-steps 9",
        f"{HARDWARE} --model llama-3-70b --cloud aws --max-nodes 1 --batch 8",
        "levers --price 1e300 --gpus 1000000000 --hours 1h",
        f"levers --price 1e300 --hours 1h --lever runs={'9' * 300}/2",
        "levers --price 1e-300 --hours 1h --runs 1e-300",
        f"{HARDWARE} --deadline 1h",
        f"{HARDWARE} --budget 1 --deadline 1h",
    ],
    ids=str,
)
def test_a_mistake_gets_a_sentence(words: str, told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and not shown.out
    told(shown.err.strip())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compute --flops many", "'many' is not a number above 0"),
        ("compute --flops -1", "is not a number above 0"),
        ("compute --flops 1e999", "is not a number above 0"),
        ("time --tokens 1B --gpu T4 --mfu 1.4", "'1.4' is not a share between 0 and 1"),
        ("time --tokens 1B --gpu T4 --mfu A=0.4", "'A' is not known: use"),
        ("time --gpu T4", "Missing option '--tokens'"),
        ("time --gpus 1.5", "'1.5' is not a whole number"),
        ("hardware --deadline 72", "'72' is not a time, such as 90s"),
        ("checkpoint --bandwidth 1", "'1' is not a rate"),
        ("levers --price 1 --hours 1h --lever bf16=48/72", "'bf16=48/72' is not a lever, such as bf16:hours"),
        ("levers --price 1 --hours 1h --lever hours=48/0", "'0' is not a number above 0"),
        ("levers --hours 1h", "Missing option '--price'"),
        ("levers --price 1 --hours 1h --lever \x1b[31mred:hours=0.5", "cannot be printed"),
        ("levers --price 1 --hours 1h --lever a\u202eb:hours=0.5", "cannot be printed"),
        ("everything", "No such command 'everything'"),
    ],
)
def test_a_word_that_cannot_be_read_is_named(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 2
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1
    assert not {"\x1b", "\u202e"} & set(shown)


def test_levers_act_one_after_the_other_on_price_hours_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = "levers --price 2 --gpus 8 --hours 10h --runs 5 --lever spot:price=0.5 --lever bf16:hours=6/10"
    found = ask(f"{words} --lever runs=0.8 --lever compile:hours=1.1", capsys)
    assert found["before"] == {"price": 16, "hours": 10, "runs": 5, "run_dollars": 160, "dollars": 800}
    assert [each["name"] for each in found["levers"]] == ["spot", "bf16", "runs", "compile"]
    assert [each["run_dollars"] for each in found["levers"]] == pytest.approx([80, 48, 48, 52.8])
    assert [each["dollars"] for each in found["levers"]] == pytest.approx([400, 240, 192, 211.2])
    assert found["saved_share"] == pytest.approx(1 - 211.2 / 800)
    assert main(["plan", *f"{words} --lever compile:hours=1.1".split()]) == 0
    text = capsys.readouterr().out
    assert "-$24.00" in text and "67.0% saved" in text and "overlap" in text


def test_without_a_lever_the_bill_is_what_the_hours_cost(capsys: pytest.CaptureFixture[str]) -> None:
    found = ask("levers --price 3.21 --hours 72h", capsys)
    assert found["before"]["dollars"] == pytest.approx(231, abs=0.2), "article 002: $231"
    assert found["levers"] == [] and found["saved_share"] == 0


def test_levers_that_make_it_dearer_are_no_saving(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "levers", "--price", "1", "--hours", "1h", "--lever", "hours=1.5"]) == 0
    text = capsys.readouterr().out
    assert "50.0% dearer than before." in text and "% saved" not in text
    assert "1 run " in text and "1 runs" not in text and ".md" not in text


def test_runs_may_be_a_part_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty to the end, and four that are stopped at 60 % of their hours."""
    found = ask("levers --price 2 --hours 10h --runs 22.4", capsys)
    assert found["before"]["dollars"] == pytest.approx(448) and found["saved_share"] == 0
    assert main(["plan", "levers", "--price", "2", "--hours", "10h", "--runs", "22.4"]) == 0
    assert "22.4 runs" in capsys.readouterr().out


COMMANDS = [
    line.partition("#")[0].removeprefix("spottrain plan ").split()
    for line in PAGE.read_text().splitlines()
    if line.startswith("spottrain plan ")
]


@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_each_command_of_the_page_works(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0, capsys.readouterr().err


def test_the_page_shows_every_question() -> None:
    assert {words[0] for words in COMMANDS} == {each.name for each in plan.app.registered_commands}


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from spottrain.cli.entry import main\n"
        "sys.argv = ['spottrain', 'plan', 'compute', '--flops', '1e21']\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "tokens/parameter" in done.stdout, done.stderr
