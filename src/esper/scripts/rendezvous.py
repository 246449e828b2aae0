"""Rendezvous backend of ``torchrun --rdzv-backend=esper``: the c10d backend of torch, with clear error
messages.

Torchrun finds the rendezvous backend by the entry point ``torchrun.handlers`` and runs it before any process
of Esper starts, so only the backend can report machines that never connect.
"""

from collections.abc import Callable

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler


def handler() -> Callable[[rendezvous.RendezvousParameters], rendezvous.RendezvousHandler]:
    """Return the function that creates the rendezvous handler, for torchrun's entry point."""
    return create


def create(params: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
    """Return a c10d rendezvous handler that prints one sentence and exits with code 1 if the rendezvous
    fails."""
    try:
        backend, store = create_backend(params)
    except rendezvous.RendezvousConnectionError as error:
        raise SystemExit(
            f"no answer from {params.endpoint}: {error}; --rdzv-endpoint must be the same on all machines,"
            " and name one of them, whose torchrun runs and whose port others can reach"
        ) from None
    made = create_handler(store, backend, params)
    meet = made.next_rendezvous

    def next_rendezvous() -> rendezvous.RendezvousInfo:
        try:
            return meet()
        except rendezvous.RendezvousTimeoutError:
            raise SystemExit(
                f"the rendezvous '{params.run_id}' at {params.endpoint} did not fill: {params.min_nodes}"
                " machines were wanted within join_timeout seconds; start torchrun on the others with the"
                " same --rdzv-id and --rdzv-endpoint, or ask for fewer with --nnodes"
            ) from None

    made.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    made.get_backend = lambda: params.backend  # type: ignore[method-assign]
    return made
