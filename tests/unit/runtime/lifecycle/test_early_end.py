"""How a training ends, in words."""

from __future__ import annotations

from spottrain.lifecycle.early_end import words_of_done


def test_a_job_that_is_done_says_how_many_steps_were_trained_and_how_to_train_more() -> None:
    assert "24 steps were trained" in words_of_done("u", 24, total=24, wanted=24)
    assert "requested" not in words_of_done("u", 24, total=24, wanted=0)
    assert "requested" not in words_of_done("u", 14, total=24, wanted=24), "early stopping has ended it"
    more = words_of_done("u", 24, total=24, wanted=40)
    assert "40 steps are requested now" in more and "onExisting: Resume" in more
