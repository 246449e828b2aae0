"""Seeds of named random streams."""

import hashlib


def derive_seed(rng_seed: int, *names: str | int) -> int:
    """Return the 63-bit seed of a named random stream, from SHA-256 of ``rng_seed/name/name...``.

    A seed depends on the names of its stream alone, not on number or order of other streams.
    """
    text = "/".join([str(rng_seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
