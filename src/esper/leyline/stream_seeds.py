"""Rng seeds of named random streams."""

import hashlib


def derive_seed(rng_seed: int, *names: str | int) -> int:
    """Return the 63-bit rng seed of a random stream with the given names, from SHA-256 of
    ``rng_seed/name/name...``.

    The derived rng seed depends only on ``rng_seed`` and the stream's names, not on other streams.
    """
    text = "/".join([str(rng_seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
