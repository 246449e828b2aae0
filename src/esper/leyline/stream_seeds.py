"""Seeds of named random streams."""

import hashlib


def derive_seed(rng_seed: int, *names: str | int) -> int:
    """Return a 63-bit seed, the first 8 bytes of SHA-256 of ``rng_seed/name/name...`` without one bit.

    A seed depends on its names alone, not on the number of other streams or the order of their creation.
    """
    text = "/".join([str(rng_seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
