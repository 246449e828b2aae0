"""Is a JPEG whole? Pillow shows one whose end is missing, and looks at nothing behind its end.

Only the order of the segments is compared: within a segment a JPEG has neither checksum nor length of its
pixels, so data that were lost from the middle of it are decoded to grey, and nothing here can tell.
"""

from __future__ import annotations

import re
from typing import Final

SIGNATURE: Final = b"\xff\xd8\xff"
END: Final = 0xD9
SCAN: Final = 0xDA
MARKER: Final = re.compile(rb"\xff+([\x01-\xfe])")
"""Any number of fill bytes may stand before a marker."""
MARKER_AFTER_SCAN: Final = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
"""Within the data of a scan, FF 00 is a value and FF D0 to FF D7 are points to restart from."""


def is_whole(content: bytes) -> bool:
    """Segment after segment up to an end that ends the file."""
    found = MARKER.match(content, 2)
    while found is not None and found[1][0] != END:
        start = found.end()
        behind = start + max(2, int.from_bytes(content[start : start + 2], "big"))
        if found[1][0] == SCAN:
            found = MARKER_AFTER_SCAN.search(content, behind)
        else:
            found = MARKER.match(content, behind)
    return found is not None and found.end() == len(content)
