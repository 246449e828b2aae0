"""Escapes for text of unknown origin that is printed on a terminal."""


def printable(text: str) -> str:
    r"""Return the text with control and other invisible characters escaped.

    Names of runs, paths and values of SQL queries can contain escape sequences that move the cursor, recolour
    the terminal or reverse the direction of text, so every function that prints them calls ``printable``.

    Example:
        >>> print(printable("run\x1b[2J"))
        run\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
