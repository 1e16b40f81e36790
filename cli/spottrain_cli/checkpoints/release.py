"""`spottrain checkpoints release`: frees a checkpoint URI whose owner died without releasing it.

A trainer that was killed outright (its node vanished) leaves HEAD active. The next attempt of the same job
takes HEAD over. If that job was deleted, only a person can know that the owner is dead.
"""

from __future__ import annotations

from spottrain.checkpoint.head.owner import HeadOwner, Identity
from spottrain.checkpoint.head.state import HeadState
from spottrain.cli.output import Answer, confirm
from spottrain.cli.reading import head_of
from spottrain.core.log_format import counted
from spottrain.storage.base import Store


def release(store: Store, *, sure: bool) -> Answer:
    """Releases an active HEAD. Raises RunError.

    It claims HEAD first, as the owner's next attempt would. The term rises, so an owner that is still alive
    (paused, cut off) is superseded and commits nothing more.
    """
    head = head_of(store)
    owner = f"job {head.job} (UID {head.jobUID}, attempt {head.attempt})"
    facts = {"uri": store.uri, "job": head.job, "jobUID": head.jobUID, "attempt": head.attempt}
    if head.state is not HeadState.ACTIVE:
        text = f"{store.uri} is {head.state} already; {owner} was its last owner."
        return Answer(facts=facts | {"released": False}, lines=[text])
    confirm(f"{store.uri} belongs to {owner}. Is that job gone for good?", sure=sure)
    holder = HeadOwner(store, Identity(job_uid=head.jobUID, job=head.job, attempt=head.attempt))
    holder.claim()
    holder.release()
    kept = counted(len(head.checkpoints), "checkpoint")
    text = f"{store.uri} is released; it keeps {kept} of {owner}."
    return Answer(facts=facts | {"released": True}, lines=[text])
