"""Ends a training before its last step.

Usually the training thread leaves through SystemExit, so that the `finally` blocks of the script run. While
that thread waits and cannot poll, another thread ends the process immediately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

from spottrain.checkpoint.manager import CheckpointManager
from spottrain.checkpoint.saver import Save
from spottrain.contract import Outcome, Reason
from spottrain.core import log
from spottrain.errors import RunError, StoreError
from spottrain.lifecycle.session import Session

SETTLE_SECONDS: Final = 60.0
"""Seconds for an upload in progress to finish when the script fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    outcome: Outcome
    text: str
    durable_seconds: float | None = None


def words_of_done(uri: str, trained: int, *, total: int, wanted: int) -> str:
    """Text for a job that was done before this attempt.

    total: the job's configured last step, which early stopping may have cut short; 0: none configured.
    wanted: the last step that this attempt asks for; 0: none.
    """
    done = f"The job is done already: {trained} steps were trained, and its weights are at {uri}."
    if wanted <= max(total, trained):
        return f"{done} To train anew use another checkpoint URI."
    return (
        f"{done} {wanted} steps are requested now, but a job that is done does not train again. To continue "
        "from its last checkpoint create a new job on this URI with checkpoint.onExisting: Resume; without "
        "Kubernetes use spottrain checkpoints copy URI --to NEW, then start with --checkpoint NEW "
        "--on-existing resume."
    )


class EarlyEnd:
    """The ways in which a training ends before its last step, or ended in an earlier attempt.

    `take` copies the state at the current step; `close` disconnects from the other ranks.
    """

    def __init__(
        self,
        session: Session,
        checkpoints: CheckpointManager | None,
        take: Callable[[], Save],
        close: Callable[[], None],
    ) -> None:
        self._session = session
        self._checkpoints = checkpoints
        self._take = take
        self._close = close

    # --- by the training thread -----------------------------------------------------------------------
    def end_done_already(self, uri: str, trained: int, *, total: int, wanted: int) -> NoReturn:
        """Ends a job that is done already: the script must not continue with untrained weights."""
        self._session.board.update(
            state="Done", step=trained, durable_step=trained, total_steps=total or trained, output_uri=uri
        )
        self._session.end(Outcome.DONE, words_of_done(uri, trained, total=total, wanted=wanted))

    def save_and_end(self) -> NoReturn:
        """Saves the newest step within the notice period, releases HEAD and leaves."""
        ending = self._save_and_release()
        self._session.end(ending.outcome, ending.text, durable_seconds=ending.durable_seconds)

    def end_broken_script(self, then: str, *, whole: bool) -> None:
        """Writes the message of a script that a stop broke. `whole`: the newest step can still be saved."""
        try:
            ending = self._save_and_release() if whole else self._unsaved()
        except RunError as error:
            self.give_up()
            self._session.conclude(error.outcome, f"{error}{then}", reason=error.reason)
            return
        except Exception as error:  # of a state_dict() of the script, or a full disk
            log.unhindered("save-failed", step=self._session.board.facts.step, error=str(error))
            ending = self._unsaved("which could not be saved")
        self._session.conclude(ending.outcome, ending.text + then, durable_seconds=ending.durable_seconds)

    def _unsaved(self, why: str = "within the step after it, which cannot be undone") -> _Ending:
        self.give_up()
        facts = self._session.board.facts
        if not facts.lost_steps:
            return _Ending(
                outcome=Outcome.INTERRUPTED, text=f"Interrupted at step {facts.step}; nothing was lost."
            )
        text = (
            f"Interrupted at step {facts.step}, {why}; {facts.lost_steps} step(s) since the last commit are "
            "lost."
        )
        return _Ending(outcome=Outcome.INTERRUPTED_LOST, text=text)

    def give_up(self) -> None:
        """Waits a limited time for an upload in progress, then releases HEAD."""
        if self._checkpoints is not None:
            self._checkpoints.settle(min(SETTLE_SECONDS, self._session.preemption.seconds_left()))
            self._checkpoints.release()

    # --- by another thread ----------------------------------------------------------------------------
    def end_before_first_step(self) -> NoReturn:
        """Ends the process before the first step is done, when no work can be lost."""
        if self._checkpoints is not None:
            self._checkpoints.release()
        step = self._session.board.facts.step
        self._session.end_now(
            Outcome.INTERRUPTED, f"Interrupted at step {step}, before a step was done; nothing was lost."
        )

    def save_and_end_now(self) -> NoReturn:
        """Saves and ends the process while the training thread waits for data at a step boundary."""
        try:
            ending = self._save_and_release()
        except RunError as error:
            self.give_up()
            self._session.fail_now(error)
        except Exception as error:
            self.give_up()
            self._session.end_now(
                Outcome.FAILED, f"{type(error).__name__}: {error}", reason=Reason.SCRIPT_FAILED
            )
        self._session.end_now(ending.outcome, ending.text, durable_seconds=ending.durable_seconds)

    # --- inside ---------------------------------------------------------------------------------------
    def _save_and_release(self) -> _Ending:
        session, board = self._session, self._session.board
        step = board.facts.step
        board.update(state="Saving")
        lost = "there is no checkpoint URI" if self._checkpoints is None else ""
        if self._checkpoints is not None and board.facts.lost_steps:
            try:
                self._checkpoints.save_before_end(self._take, step)
            except StoreError as error:
                board.save_failed(str(error))
                lost = str(error)
        durable_seconds = time.time() - (session.preemption.signalled_at or time.time())
        self.give_up()
        self._close()
        if board.facts.lost_steps:
            return _Ending(
                outcome=Outcome.INTERRUPTED_LOST,
                text=f"Interrupted at step {step}; {board.facts.lost_steps} step(s) are lost: {lost}.",
            )
        return _Ending(
            outcome=Outcome.INTERRUPTED,
            text=f"Interrupted at step {step}, which is saved; the same command resumes from there.",
            durable_seconds=durable_seconds,
        )
