"""Is a PNG whole? Pillow shows one without checksums compared and with rows missing, black, as if it were."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By colour type: grey, RGB, palette, grey with alpha, RGB with alpha."""
INTERLACED: Final = {
    0: ((0, 0, 1, 1),),
    1: (
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ),
}
"""By interlace method: first row, first column, step of rows, step of columns of each pass."""
CHUNK: Final = 1 << 18


def is_whole(content: bytes) -> bool:
    """Chunks with right checksums up to an IEND that ends the file, and data for exactly the stated rows."""
    chunks = list(_chunks(content))
    if not chunks or chunks[0][0] != b"IHDR" or len(chunks[0][1]) != 13 or chunks[-1][0] != b"IEND":
        return False
    width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    if colour not in CHANNELS or interlace not in INTERLACED:
        return False
    rows = _rows_size(width, height, depth * CHANNELS[colour], interlace)
    return _unpacks_to(b"".join(data for name, data in chunks if name == b"IDAT"), rows)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and data of each; the last name is IEND only where all is right and nothing follows."""
    place = len(SIGNATURE)
    while place < len(content):
        end = place + 8 + int.from_bytes(content[place : place + 4], "big")
        name = content[place + 4 : place + 8]
        right = content[end : end + 4] == zlib.crc32(content[place + 4 : end]).to_bytes(4, "big")
        yield name if right else b"", content[place + 8 : end]
        place = end + 4 if right else len(content)


def _rows_size(width: int, height: int, pixel_bits: int, interlace: int) -> int:
    """Bytes of all rows, each with its filter byte."""
    size = 0
    for first_row, first_column, row_step, column_step in INTERLACED[interlace]:
        rows = max(0, -(-(height - first_row) // row_step))
        columns = max(0, -(-(width - first_column) // column_step))
        size += rows * (1 + (columns * pixel_bits + 7) // 8) if columns else 0
    return size


def _unpacks_to(packed: bytes, size: int) -> bool:
    """Does the zlib stream end after ``size`` bytes, with its checksum right? Takes no memory for them."""
    stream = zlib.decompressobj()
    unpacked = 0
    try:
        while packed and unpacked <= size:
            unpacked += len(stream.decompress(packed, CHUNK))
            packed = stream.unconsumed_tail
    except zlib.error:
        return False
    return stream.eof and unpacked == size and not stream.unused_data
