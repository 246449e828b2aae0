"""Content of files that may be gzip-compressed, told by their first bytes and not by their names."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import AGAIN, file_size, open_file, read_bytes, refusals

SIGNATURE: Final = b"\x1f\x8b"
GREATEST_RATIO: Final = 1032  # deflate's best: 258 bytes in two bits
GZIP_WINDOW: Final = 31  # makes zlib read gzip's header, and compare its checksum and length
CHUNK: Final = 1 << 18


def read_content(path: Path, wanted: str, *, limit: int) -> bytearray:
    """The first ``limit`` bytes of the content; a compressed file is checked when it ends before them."""
    if read_bytes(path, wanted, limit=len(SIGNATURE)) != SIGNATURE:
        return read_bytes(path, wanted, limit=limit)
    content = bytearray()
    try:
        with refusals(path, wanted), open_file(path) as file:
            for piece in _unpacked(file):
                content += piece
                if len(content) >= limit:
                    break
    except EOFError:
        raise DataError(f"'{path}' ends in the middle of its compressed data; {AGAIN}") from None
    except zlib.error as error:
        raise DataError(f"'{path}' is damaged ({error}); {wanted} is expected there: {AGAIN}") from None
    del content[limit:]
    return content


def capacity(path: Path, wanted: str) -> int:
    """More bytes of content than this the file cannot have."""
    size = file_size(path, wanted)
    packed = read_bytes(path, wanted, limit=len(SIGNATURE)) == SIGNATURE
    return size * GREATEST_RATIO if packed else size


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    """Pieces of at most ``CHUNK`` bytes, member by member; ``EOFError`` when the last one is not complete.

    Not ``gzip.open``: that one takes zeros after the last member for padding.
    """
    packed = file.read(CHUNK)
    while packed:
        member = zlib.decompressobj(wbits=GZIP_WINDOW)
        while not member.eof:
            packed = packed or file.read(CHUNK)
            if not packed:
                raise EOFError
            yield member.decompress(packed, CHUNK)
            packed = member.unconsumed_tail
        packed = member.unused_data or file.read(CHUNK)
