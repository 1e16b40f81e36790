"""Accumulated micro-batches are one big batch, whatever their sizes and counts; the last window too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import spottrain
import torch
from spottrain.distributed.world import World
from spottrain.techniques import accumulation
from spottrain.techniques.accumulation import MicroBatch, Reweighed

from tests.support.sentences import Told

ALONE = World()
IGNORED = -100
Tokens = tuple[torch.Tensor, torch.Tensor]


def tokens(counts: Iterable[int], length: int = 6) -> list[Tokens]:
    """A micro-batch of two rows for each count: so many labels are not ignored."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for count in counts:
        labels = torch.randint(3, (2, length), generator=generator)
        labels.view(-1)[count:] = IGNORED
        found.append((torch.randn(2, length, 4, generator=generator, dtype=torch.float64), labels))
    return found


def count(batch: Tokens) -> int:
    return int((batch[1] != IGNORED).sum())


def mean_loss(model: torch.nn.Module, batch: Tokens) -> torch.Tensor:
    """Over the tokens that count, as torch and transformers have it."""
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradient(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def of_one_batch(batches: list[Tokens]) -> torch.Tensor:
    net = model()
    backward(mean_loss(net, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))))
    return gradient(net)


def of_windows(
    batches: list[Tokens], size: int, counted: Callable[[Any], float] | None = count, **options: Any
) -> list[torch.Tensor]:
    """Gradient of each optimizer step."""
    net, found = model(), []
    for part in accumulation.parts(batches, size, count=counted, world=ALONE, **options):
        backward(mean_loss(net, part.batch) * part.weight)
        if part.last:
            found.append(gradient(net))
            net.zero_grad(set_to_none=True)
    return found


def test_unequal_counts_of_tokens_give_the_gradient_of_one_big_batch() -> None:
    batches = tokens([12, 3, 7, 1])
    (found,), (mean_of_means,) = of_windows(batches, 4), of_windows(batches, 4, counted=None)
    torch.testing.assert_close(found, of_one_batch(batches))
    assert not torch.allclose(mean_of_means, found, rtol=0.05)


def test_the_last_partial_window_is_a_step_of_its_own() -> None:
    batches = tokens([12, 3, 7, 1, 5])
    found = of_windows(batches, 2)
    assert len(found) == 3
    for step, window in zip(found, (batches[:2], batches[2:4], batches[4:]), strict=True):
        torch.testing.assert_close(step, of_one_batch(window))


def test_without_a_count_all_micro_batches_weigh_the_same_in_their_window() -> None:
    parts = list(accumulation.parts(range(5), 2, world=ALONE))
    assert [p.batch for p in parts] == [0, 1, 2, 3, 4]
    assert [p.weight for p in parts] == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert [p.last for p in parts] == [False, True, False, True, True]
    assert list(accumulation.parts([], 4, world=ALONE)) == [], "no data, no step"


def test_a_micro_batch_without_a_token_that_counts_is_left_out_for_its_mean_is_none() -> None:
    batches = tokens([4, 0, 3])
    assert torch.isnan(mean_loss(model(), batches[1]))
    (found,) = of_windows(batches, 3)
    torch.testing.assert_close(found, of_one_batch([batches[0], batches[2]]))


def test_a_step_without_any_is_a_step_whose_gradient_is_zero_and_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = of_windows(tokens([4, 2, 0, 0, 3]), 2, spare=lambda: tokens([7])[0])
    assert len(found) == 3, "else the position in the data would stay behind by one"
    assert float(found[1].abs().max()) == 0.0
    assert capsys.readouterr().out.count("event=empty-step") == 1


def test_without_a_filler_that_another_attempt_takes_too_it_is_left_out_wherever_an_attempt_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever came before it: what would do for a filler, a resume would not know."""
    whole, resumed = of_windows(tokens([4, 0, 3]), 1), of_windows(tokens([0, 3]), 1)
    assert len(whole) == 2 and len(resumed) == 1
    assert capsys.readouterr().out.count("event=step-left-out") == 2


class Set(torch.utils.data.Dataset[Tokens]):
    """One micro-batch of tokens for each sample, with noise that depends on the random state."""

    def __init__(self, counts: Iterable[int]) -> None:
        self.held = tokens(counts)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> Tokens:
        values, labels = self.held[number]
        return values + torch.randn_like(values), labels


def first(samples: list[Tokens]) -> Tokens:
    return samples[0]


def ours(data: Set) -> tuple[Any, Any]:
    loader = spottrain.data.loader(data, shuffle=False, collate_fn=first, world=ALONE)
    return loader, loader


def by_our_sampler(data: Set) -> tuple[Any, Any]:
    sampler = spottrain.data.BatchSampler(data, shuffle=False, world=ALONE)
    return torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=first), sampler


@pytest.mark.parametrize("made", [ours, by_our_sampler])
def test_a_filler_is_the_same_in_each_attempt(made: Callable[[Set], tuple[Any, Any]]) -> None:
    def found(skipped: int, seed: int) -> Tokens:
        torch.manual_seed(seed)
        loader, cursor = made(Set([0, 5, 3, 0]))
        cursor.advance(skipped)
        *_, last = accumulation.parts(loader, 1, count=count, world=ALONE)
        assert (count(last.batch), last.weight, last.last) == (5, 0.0, True)
        batch: Tokens = last.batch
        return batch

    for one, other in zip(found(0, seed=1), found(3, seed=2), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_filler_of_another_kind_of_loader_is_the_one_that_is_given() -> None:
    stream = accumulation.parts(tokens([0, 4]), 1, count=count, world=ALONE, spare=lambda: tokens([7])[0])
    assert [(count(part.batch), part.weight) for part in stream] == [(7, 0.0), (4, 1.0)]


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_sampler": [[1], [2]]}, {"sampler": torch.utils.data.SubsetRandomSampler([1, 2])}],
    ids=["torch's own", "own batches", "own sampler"],
)
def test_only_of_a_loader_with_a_position_is_a_filler_found(options: dict[str, Any]) -> None:
    """A custom sampler alone knows which samples there are, and how many make a batch."""
    loader = torch.utils.data.DataLoader(Set([9, 0, 4]), collate_fn=first, **options)
    stream = accumulation.parts(loader, 1, count=count, world=ALONE)
    assert [(count(part.batch), part.weight) for part in stream if count(part.batch) != 9] == [(4, 1.0)]


def test_a_loader_is_read_one_window_at_a_time() -> None:
    read: list[int] = []

    def loader() -> Iterable[int]:
        for number in range(6):
            read.append(number)
            yield number

    stream = accumulation.parts(loader(), 2, world=ALONE)
    first: MicroBatch[int] = next(iter(stream))
    assert first.batch == 0 and read == [0, 1]


# --- for a loop that has shares -------------------------------------------------------------------------
def test_shares_by_samples_are_replaced_by_shares_by_tokens() -> None:
    batches, net = tokens([12, 3, 7]), model()
    reweighed = Reweighed[Tokens](count, ALONE)
    for batch, share in reweighed([(batch, 1 / 3) for batch in batches]):
        backward(mean_loss(net, batch) * share)
    torch.testing.assert_close(gradient(net), of_one_batch(batches))


def test_a_filler_and_one_without_tokens_stay_passes_but_count_nothing() -> None:
    batches = tokens([12, 0, 7])
    (a, first), (b, second), (c, third) = Reweighed[Tokens](count, ALONE)(
        zip(batches, [0.5, 0.5, 0.0], strict=True)
    )
    assert [first, second, third] == [1.0, 0.0, 0.0], "the third is a filler, whatever its tokens"
    assert a is b is c is batches[0], "nothing with a mean of 0 / 0 comes to the model"


def test_of_a_step_in_which_nothing_counts_the_gradient_is_zero_and_not_nan() -> None:
    reweighed, net = Reweighed[Tokens](count, ALONE), model()
    reweighed([(tokens([5])[0], 1.0)])
    for batch, share in reweighed([(tokens([0])[0], 1.0)]):
        backward(mean_loss(net, batch) * share)
    assert float(gradient(net).abs().max()) == 0.0


def test_where_nothing_of_a_step_counts_a_spare_that_is_given_is_asked_for_once() -> None:
    (spare, *_), asked = tokens([9]), []

    def make() -> Tokens:
        asked.append(1)
        return spare

    reweighed = Reweighed[Tokens](count, ALONE, spare=make)
    reweighed([(tokens([5])[0], 1.0)])
    assert not asked, "in a step in which one counts, that one serves"
    for _ in range(2):
        ((batch, share),) = reweighed([(tokens([0])[0], 1.0)])
        assert batch is spare and share == 0.0
    assert asked == [1]


def test_a_rank_that_never_had_anything_to_count_is_refused(told: Told) -> None:
    told(lambda: Reweighed[Tokens](count, ALONE)([(tokens([0])[0], 1.0)]))


# --- refused ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_count_that_is_none_is_refused(bad: float, told: Told) -> None:
    told(lambda: Reweighed[int](lambda _: bad, ALONE)([(1, 1.0)]))
    told(lambda: list(accumulation.parts([1], 1, count=lambda _: bad, world=ALONE)))


def test_a_window_of_no_micro_batch_is_refused(told: Told) -> None:
    told(lambda: list(accumulation.parts([1], 0)))
