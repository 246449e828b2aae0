"""Reader of plain text, and division of a sequence of tokens into windows, the samples."""

from pathlib import Path
from typing import Final

from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import read_bytes

WANTED: Final = "a text file in UTF-8"


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file with unchanged line ends.

    A text file that was cut off between two characters is accepted, because the cut cannot be detected.
    """
    content = read_bytes(path, WANTED)
    if not content:
        raise DataError(f"'{path}' is empty; {WANTED} with at least one character is expected there")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' cannot be decoded at offset {error.start} (byte 0x{content[error.start]:02x},"
            f" {error.reason}); {WANTED} is expected there: convert it, or copy or download it again"
        ) from None


def windows(tokens: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-token targets ``[window, context]`` of a sequence of tokens.

    The windows of ``context`` tokens do not overlap; an incomplete window at the end is dropped.
    """
    if context < 1:
        raise DataError(f"a context of {context} tokens was asked for; ask for at least 1")
    if tokens.ndim != 1 or len(tokens) < context + 1:
        raise DataError(
            f"tokens of shape {list(tokens.shape)} cannot fill one window; {context} of context and one to"
            " predict are needed in a row: give a longer text or a shorter context"
        )
    used = (len(tokens) - 1) // context * context
    return tokens[:used].reshape(-1, context), tokens[1 : used + 1].reshape(-1, context)
