"""Writers of small data files, independent of the readers under test, and functions that damage files."""

import gzip
import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from esper.leyline.errors import DataError

Bytes = NDArray[np.uint8]
IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_NAMES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
KINDS = ("PNG", "JPEG", "BMP", "WEBP")


def random_bytes(*shape: int, below: int = 256, rng_seed: int = 0) -> Bytes:
    return np.random.default_rng(rng_seed).integers(below, size=shape, dtype=np.uint8)


def idx_bytes(values: Bytes) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def mnist_like(train: int = 5, test: int = 3, height: int = 2, width: int = 3) -> dict[str, Bytes]:
    """Return images and labels for training and test of an MNIST-like data set, by file name."""
    shapes = ((train, height, width), (train,), (test, height, width), (test,))
    return {
        name: random_bytes(*shape, below=256 if len(shape) == 3 else 10, rng_seed=place)
        for place, (name, shape) in enumerate(zip(IDX_NAMES, shapes, strict=True))
    }


def write_mnist_like(folder: Path, arrays: dict[str, Bytes], *, packed: bool = False) -> None:
    for name, values in arrays.items():
        content = idx_bytes(values)
        write_files(folder, {f"{name}.gz": gzip.compress(content, mtime=0)} if packed else {name: content})


def write_cifar(folder: Path, records: int) -> dict[str, tuple[Bytes, Bytes]]:
    """Write binary batches of CIFAR-10 record by record; return labels and images by file name."""
    written = {}
    for place, name in enumerate(CIFAR_NAMES):
        labels = random_bytes(records, below=10, rng_seed=place)
        images = random_bytes(records, 3, 32, 32, rng_seed=100 + place)
        content = b"".join(
            bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True)
        )
        write_files(folder, {name: content})
        written[name] = labels, images
    return written


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_bytes(pixels: Bytes) -> bytes:
    """Return a PNG of pixels [height, width] (grey) or [height, width, channel] (RGB), not made by Pillow."""
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def image_bytes(pixels: Bytes, kind: str, mode: str | None = None, **options: object) -> bytes:
    """Return pixels [height, width] or [height, width, channel] as a file encoded by Pillow."""
    image = Image.fromarray(pixels)
    if mode is not None:
        image = image.convert(mode)
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def cuts(content: bytes) -> list[bytes]:
    """Return truncated copies of a file's content: empty, one byte, one half, all but one byte."""
    return [content[:length] for length in (0, 1, len(content) // 2, len(content) - 1)]


def flips(content: bytes, count: int, rng_seed: int = 0) -> Iterator[bytes]:
    """Yield ``count`` copies of a file's content with one random bit flipped in each."""
    rng = random.Random(rng_seed)
    for bit in rng.sample(range(8 * len(content)), count):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a ``DataError`` whose message has one line and contains all ``parts``."""
    with pytest.raises(DataError) as caught:
        yield
    sentence = str(caught.value)
    for part in parts:
        assert part in sentence
    assert "\n" not in sentence


def denied(*_: object, **__: object) -> None:
    """Raise PermissionError in place of a system call, because tests may run as root, who has all rights."""
    raise PermissionError(13, "Permission denied")
