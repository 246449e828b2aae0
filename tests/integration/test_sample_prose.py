from tools.sample_prose import sentences_of

SOURCE = '''"""Reader of batches.

    python example.py

It caches them. ``next`` returns one.
"""

LIMIT = 3  # batches in memory
"""Largest number of batches."""


# A second process would need
# a lock.
def test_cache_is_cleared_at_the_end(path: str) -> None:
    """Return nothing.

    Args:
        path: Folder of the cache,
            created if missing.

    Returns:
        Number of batches in the
        cache.

    Example:
        >>> count(Path("cache"))
    """  # noqa: D100
'''


def test_sample_prose_splits_sentences_and_omits_code_and_linter_directives() -> None:
    assert sorted((place, text) for text, place in sentences_of(SOURCE, "file")) == [
        ("file:1", "It caches them."),
        ("file:1", "Reader of batches."),
        ("file:1", "``next`` returns one."),
        ("file:12", "A second process would need a lock."),
        ("file:14", "test_cache_is_cleared_at_the_end"),
        ("file:15", "Number of batches in the cache."),
        ("file:15", "Return nothing."),
        ("file:15", "path: Folder of the cache, created if missing."),
        ("file:8", "batches in memory"),
        ("file:9", "Largest number of batches."),
    ]
