"""Seeds of named random streams: the same names give the same stream, whatever else runs."""

import hashlib


def derive_seed(rng_seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream ``names`` of the run ``rng_seed``.

    Streams of different names are independent; none depends on how many others there are or on
    the order in which they were made.
    """
    text = "/".join([str(rng_seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
