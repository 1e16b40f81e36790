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

from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass, field

from spottrain.contract import term_of_blob, term_of_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Named(Container[str]):
    """The contents that the checkpoints in HEAD name, or may name."""

    keys: Set[str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why checkpoints cannot be read, by key. One may name any content of its own or of an earlier term."""

    def __contains__(self, key: object) -> bool:
        term = term_of_blob(str(key)) or 0
        return key in self.keys or any((term_of_key(each) or term) >= term for each in self.unreadable)


def unnamed(keys: Iterable[str], named: Container[str], *, below: int) -> list[str]:
    """Returns the keys of terms under `below` that are not in `named`; keys of another form are ignored."""
    return [
        key for key in keys if (term := term_of_blob(key)) is not None and term < below and key not in named
    ]
