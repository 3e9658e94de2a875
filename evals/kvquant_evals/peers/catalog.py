"""All peers: which there are, which can run here, and what they are."""

from __future__ import annotations

from collections.abc import Sequence

from kvquant_evals.error import EvalError
from kvquant_evals.peers.layout import LAYOUTS
from kvquant_evals.peers.peer import Peer
from kvquant_evals.peers.simulated import SIMULATED
from kvquant_evals.peers.stock import STOCK

PEERS: tuple[Peer, ...] = (*STOCK, *LAYOUTS, *SIMULATED)


def runnable() -> list[Peer]:
    """The peers that can run here."""
    return [peer for peer in PEERS if peer.recipe.missing() is None]


def find(names: Sequence[str]) -> list[Peer]:
    """The peers of these names, each once. Raises EvalError for one that there is not, or that cannot run here."""
    known = {peer.name: peer for peer in PEERS}
    found = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise EvalError(f"peer {name!r} is unknown; known are {', '.join(known)}")
        missing = known[name].recipe.missing()
        if missing:
            raise EvalError(f"peer {name!r} cannot run here: {missing}")
        found.append(known[name])
    return found


def listing() -> str:
    """What each peer is, for people."""
    return "\n".join(peer.describe() for peer in PEERS)
