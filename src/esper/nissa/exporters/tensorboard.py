"""Export to TensorBoard: numbers of rows as scalars, the configuration as text, in an event file.

A TensorBoard event file is a sequence of records, each a protocol buffer message with checksums. Event files
are encoded without a library, because scalars and texts need only a dozen fields of one stable message. The
package ``tensorboard`` would add 60 MB with a web server and gRPC; ``tensorboardX`` adds 6 MB, but imports
torch if installed, and its ``flush`` does not wait for its queue. Tests read exported event files with
TensorBoard's own reader.

The protocol buffer messages of event files are ``Event``, ``Summary``, ``TensorProto`` and their parts in
``tensorboard/compat/proto``.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from ctypes import c_float
from pathlib import Path
from typing import Final

from esper.leyline import RunRow
from esper.nissa.exporters.points import Points, create_export_folder, provenance, wall_time

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers: varint, 64-bit, length-delimited and 32-bit."""
_STRING_TENSOR: Final = 7
"""Value of ``DataType.DT_STRING`` in TensorBoard's protocol buffers."""


# --- event files ------------------------------------------------------------------------------------


class EventFile:
    """New TensorBoard event file; an added event may stay in a buffer until ``flush`` writes it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._file = path.open("xb")
        self._write(_double(1, seconds) + _bytes(3, b"brain.Event:2"))

    def add(self, seconds: float, step: int, values: Iterable[bytes]) -> None:
        """Append one event with values encoded by ``scalar`` and ``text``."""
        summary = b"".join(_bytes(1, value) for value in values)
        self._write(_double(1, seconds) + _integer(2, step) + _bytes(5, summary))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def scalar(tag: str, number: float) -> bytes:
    """Encode a number with a tag for TensorBoard. TensorBoard scalars are float32; numbers beyond the range
    of float32 are stored as infinite.
    """
    # The C conversion to float makes a number beyond the range infinite, where struct.pack() would refuse it.
    return _bytes(1, tag.encode()) + _key(2, _FIXED32) + struct.pack("<f", c_float(number).value)


def text(tag: str, markdown: str) -> bytes:
    """Encode a text with a tag, for TensorBoard's text plugin."""
    plugin = _bytes(1, _bytes(1, b"text"))
    tensor = _integer(1, _STRING_TENSOR) + _bytes(8, markdown.encode())
    return _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, plugin)


def _double(field: int, number: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", number)


def _integer(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(number: int) -> bytes:
    """Encode a natural number in seven bits per byte, lowest bits first; the high bit means that another byte
    follows.
    """
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C checksum, rotated and offset as the record format of TensorBoard requires."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_CRC_TABLE: Final = tuple(_crc_of_byte(byte) for byte in range(256))


# --- export -----------------------------------------------------------------------------------------


class TensorBoardExporter(EventFile):
    """Exporter to a TensorBoard event file in an empty directory; TensorBoard would merge other event files
    there into the same run.
    """

    def __init__(self, run: RunRow, out: Path) -> None:
        create_export_folder(out)
        self._run = run
        self.view = f"tensorboard --logdir {out}"
        began = wall_time(run, 0.0)
        super().__init__(out / f"events.out.tfevents.{began:.0f}.esper", began)
        texts = {"run/configuration": run.config, "run/provenance": provenance(run)}
        self.add(began, 0, [text(tag, table(facts)) for tag, facts in texts.items()])

    def take(self, points: Points) -> None:
        values = [scalar(tag, number) for tag, number in points.values.items()]
        self.add(wall_time(self._run, points.t), points.step, values)


def table(facts: Mapping[str, object]) -> str:
    """Return names and values as a Markdown table; a nested map has one table row per entry."""
    rows = [f"| {_cell(name)} | {_cell(fact)} |" for name, fact in _flat(facts)]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _flat(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, fact in facts.items():
        if isinstance(fact, dict):
            yield from _flat(fact, f"{prefix}{name}.")
        else:
            yield prefix + name, fact


def _cell(fact: object) -> str:
    """Return the text of a Markdown table cell; None is a dash, and characters that would end the cell are
    replaced.
    """
    return "–" if fact is None else str(fact).replace("|", "\\|").replace("\n", " ")
