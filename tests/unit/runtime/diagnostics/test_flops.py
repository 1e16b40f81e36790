"""What a step costs: counted as PyTorch counts, without changing the step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from spottrain.core.gpu_catalogue import GPUS, known_gpu
from spottrain.diagnostics import flops
from spottrain.diagnostics.flops import (
    CPU_BANDWIDTH,
    LAUNCH_SECONDS,
    Machine,
    Roofline,
    Work,
    counted,
    machine,
)
from spottrain.techniques.activation_checkpointing import apply
from torch.utils.flop_counter import FlopCounterMode

from tests.support.fresh import Fresh

CPU = torch.device("cpu")
MACHINE = Machine(peaks={"fp32": 1e9, "bf16": 1e10}, bandwidth=1e6, cache_bytes=1000)


class Block(torch.nn.Module):
    """A decoder's: attention and two matrices, with nothing but what the formula counts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        parts = self.qkv(x).view(batch, context, 3 * self.heads, width // self.heads).transpose(1, 2)
        q, k, v = parts.chunk(3, dim=1)
        weights = (q @ k.transpose(2, 3)).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        x = x + self.down(torch.relu(self.up(x)))
        return x


def train(model: torch.nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def test_flops_are_those_of_torchs_own_counter() -> None:
    model, x = Block(32, 4), torch.randn(2, 8, 32)
    with FlopCounterMode(display=False) as theirs:
        train(model, x)
    with counted() as work:
        train(model, x)
    assert work.flops == theirs.get_total_flops() > 0


def test_the_formula_for_transformers_agrees_with_what_is_counted() -> None:
    width, heads, layers, batch, context = 64, 4, 3, 2, 16
    model = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
    x = torch.randn(batch, context, width, requires_grad=True)  # as of an embedding before it
    with counted() as work:
        train(model, x)
    # 6N + 12 L H Q T FLOPs per token: PaLM (Chowdhery et al., 2022), appendix B. H x Q is the width.
    parameters = sum(each.numel() for each in model.parameters())
    assert work.flops == batch * context * (6 * parameters + 12 * layers * width * context)


def test_what_activation_checkpointing_computes_again_is_no_work_of_the_model() -> None:
    model, x = torch.nn.Sequential(Block(32, 4), Block(32, 4)), torch.randn(2, 8, 32)
    with counted(CPU) as plain:
        train(model, x)
    apply(model, "all")
    with counted(CPU) as again:
        train(model, x)
    assert again.flops == plain.flops > 0 and again.formats == plain.formats
    assert again.roofline is not None and plain.roofline is not None
    assert again.roofline.total > plain.roofline.total, "the machine does it all the same"


def test_a_gradient_of_a_gradient_is_no_recomputation() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with counted() as work:
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()  # type: ignore[no-untyped-call]
    assert work.flops == 6 * (2 * 2 * 4 * 4), "six products: one forward, one back, four for the second slope"


def test_the_format_is_what_is_computed_in_and_not_what_the_weights_have() -> None:
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with counted() as work, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().sum().backward()
    assert work.format == "bf16" and set(work.formats) == {"bf16"}
    with counted() as work:
        train(model.bfloat16(), x.bfloat16())
    assert work.format == "bf16"
    with counted() as work:
        x + x
    assert work.format is None


def test_the_peaks_of_a_machine_are_taken_by_format() -> None:
    roof = Roofline()
    roof.add(MACHINE, 10**8, 1000, "bf16")
    assert roof.total == pytest.approx(10**-2)
    roof.add(MACHINE, 10**8, 1000, "")
    assert roof.total == pytest.approx(10**-2 + 10**-1), "another format counts as fp32"


def test_counting_changes_no_bit_of_the_gradients() -> None:
    model, x = Block(32, 4), torch.randn(2, 8, 32)
    other = copy.deepcopy(model)
    train(model, x)
    with counted(CPU):
        train(other, x)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_an_operation_moves_what_it_reads_and_writes_and_a_view_nothing() -> None:
    tensors = torch.ones(2**24), torch.ones(2**24)
    cases: list[tuple[Callable[[], torch.Tensor], bool]] = [
        (lambda: torch.add(*tensors), True),
        (lambda: tensors[0].view(2**12, 2**12).t(), False),
        (lambda: torch.empty(2**24), False),
    ]
    for act, of_memory in cases:
        with counted(CPU) as work:
            act()
        assert work.flops == 0 and work.roofline is not None and work.roofline.launch <= 2 * LAUNCH_SECONDS
        assert work.roofline.memory == pytest.approx(3 * 2**26 / CPU_BANDWIDTH if of_memory else 0.0)


@pytest.mark.parametrize(
    ("flops", "size", "bound"),
    [
        (10**8, 1000, "arithmetic"),  # 0.1 s; 20 ns in the cache
        (10**6, 100_000, "memory"),  # 1 ms; 0.1 s
        (100, 100, "launch"),  # 0.1 us; 2 ns; 6 us
        (0, 1000, "launch"),  # in the cache
        (0, 1001, "memory"),  # 1 ms, out of it
    ],
)
def test_an_operation_is_put_down_to_what_binds_it(flops: int, size: int, bound: str) -> None:
    roof = Roofline()
    roof.add(MACHINE, flops, size)
    assert {name: getattr(roof, name) > 0 for name in ("arithmetic", "memory", "launch")} == {
        name: name == bound for name in ("arithmetic", "memory", "launch")
    }
    assert roof.total == getattr(roof, bound)


def test_without_a_machine_there_is_no_roofline() -> None:
    with counted() as work:
        torch.ones(1)
    assert work.roofline is None


# --- peaks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM-80GB", 312),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(name: str, teraflops: float) -> None:
    gpu = known_gpu(name)
    assert gpu is not None and gpu.flops["bf16"] == teraflops * 1e12


@pytest.mark.parametrize(
    "name", ["Tesla T4", "Tesla V100-SXM2-16GB", "Tesla V100-DGXS-32GB", "Tesla V100-PCIE-32GB"]
)
def test_a_gpu_without_bf16_has_no_peak_in_it(name: str) -> None:
    gpu = known_gpu(name)
    assert gpu is not None and "bf16" not in gpu.flops and "fp16" in gpu.flops


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10-8Q",
        "NVIDIA A100-SXM-64GB",  # Leonardo's: another chip
        "NVIDIA H100 80GB HBM2e",  # PCIe or SXM
        "NVIDIA H100 64GB HBM2",
        "Tesla V100-FHHL-16GB",
    ],
)
def test_of_another_gpu_or_a_part_of_one_nothing_is_said(name: str) -> None:
    assert known_gpu(name) is None


@pytest.mark.parametrize(
    ("name", "matmul", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "none", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla T4", "tf32", 8.1e12),
    ],
)
def test_fp32_means_tf32_only_where_torch_was_told_so(
    name: str, matmul: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(flops, "float32_matmul", lambda: matmul)
    found = machine(torch.device("cuda"))
    assert found is not None and found.peaks["fp32"] == peak


def test_memory_is_told_apart_where_the_name_does() -> None:
    names = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")
    assert [gpu.bandwidth for name in names if (gpu := known_gpu(name))] == [1555e9, 2039e9, 1935e9]


@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.set_float32_matmul_precision('high')",
    ],
)
def test_whether_fp32_is_tf32_is_known_whichever_way_a_script_said_so(setting: str, fresh: Fresh) -> None:
    """In a process of its own: the settings are the process's, and some cannot be taken back."""
    code = (
        "import torch\nfrom spottrain.core.device import float32_matmul\n"
        f"print(float32_matmul() == 'tf32')\n{setting}\nprint(float32_matmul() == 'tf32')"
    )
    assert fresh.run(code).split() == ["False", "True"]


def test_every_gpu_has_a_source_and_no_figure_of_sparsity() -> None:
    assert all(gpu.source for gpu in GPUS.values())
    most = {name: gpu.flops["fp16"] / 1e12 for name, gpu in GPUS.items() if gpu.flops["fp16"] >= 1000e12}
    assert most == {"B200": 2250, "MI300X": 1307.4}, "their sheets print twice that with sparsity"


def test_mfu_is_of_the_peak_of_each_format_and_a_cpu_has_none() -> None:
    def mfu(formats: dict[str, int], seconds: float) -> float | None:
        return Work(formats=formats, peaks={"bf16": 312e12, "fp32": 19.5e12}).mfu(seconds)

    assert mfu({"bf16": 156 * 10**12}, 2.0) == 0.25
    assert mfu({"bf16": 156 * 10**12, "fp32": 195 * 10**11}, 2.0) == 0.75
    assert mfu({"bf16": 156 * 10**12}, 0.0) is None and mfu({}, 1.0) is None
    assert mfu({"fp16": 1}, 1.0) is None and mfu({"": 1}, 1.0) is None
    with counted(CPU) as work:
        train(Block(32, 4), torch.randn(2, 8, 32))
    assert work.flops and work.mfu(1.0) is None


def test_the_work_of_several_micro_batches_is_a_multiple() -> None:
    with counted(CPU) as work:
        train(Block(32, 4), torch.randn(2, 8, 32))
    twice = work.times(2)
    assert twice.flops == 2 * work.flops and twice.format == "fp32"
    assert twice.roofline is not None and work.roofline is not None
    assert twice.roofline.total == 2 * work.roofline.total


def test_the_limits_of_a_cpu_grow_with_its_threads_and_an_unknown_device_has_none() -> None:
    found = machine(CPU)
    assert found is not None and found.peaks["fp32"] % torch.get_num_threads() == 0
