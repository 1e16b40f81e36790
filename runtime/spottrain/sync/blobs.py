"""Which stored contents no checkpoint needs any more. Pure.

The contents that a commit sends lie in a folder of its own (`contract.blobs_of`), whose name holds the term
of the claim and a random part. Later checkpoints of the same files name them there. So a key is never
written for a second purpose, and it is safe to delete

* what no checkpoint in HEAD names, of a term below the owner's: a later claim takes over what HEAD names
  then, and adds keys of its own term only;
* what a commit of the owner itself has dropped, or sent in vain, once that commit is done: a successor
  takes over that HEAD, or a later one of the same owner.

A process that was superseded may delete late. It can only delete what the HEAD of its own last commit does
not name, which is what no successor can name either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spottrain.contract import term_of_blob


def unnamed(keys: Iterable[str], named: Collection[str], *, below: int) -> list[str]:
    """Returns the keys of terms under `below` that are not in `named`; keys of another form are ignored."""
    return [
        key for key in keys if (term := term_of_blob(key)) is not None and term < below and key not in named
    ]
