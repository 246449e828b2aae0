"""Reader of image files: decoded pixels, and files that are refused."""

import struct
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from esper.tolaria.readers.image_files import read_image
from tests.tolaria.readers.building import KINDS, Bytes, image_bytes, png_bytes, random_bytes, refused

COLOURS = random_bytes(5, 7, 3)
GREYS = random_bytes(5, 7)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "image"


def read(path: Path, content: bytes) -> Bytes:
    """Write an image file and return its pixels [channel, height, width]."""
    path.write_bytes(content)
    return read_image(path).numpy()


def huge_bmp(height: int, width: int) -> bytes:
    """Return a BMP whose header states more pixels than the file contains."""
    content = bytearray(image_bytes(COLOURS, "BMP"))
    content[18:26] = struct.pack("<ii", width, height)
    return bytes(content)


def test_pixels_of_a_png_file_are_returned_channel_by_channel(path: Path) -> None:
    pixels = np.array([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], np.uint8)  # The image has one row of three pixels.
    assert read(path, png_bytes(pixels)).tolist() == [[[1, 4, 7]], [[2, 5, 8]], [[3, 6, 9]]]


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_pixels_of_lossless_image_formats_are_read_as_written(
    path: Path, kind: str, options: dict[str, object]
) -> None:
    assert np.array_equal(read(path, image_bytes(COLOURS, kind, **options)), np.moveaxis(COLOURS, 2, 0))


@pytest.mark.parametrize("mode", ["1", "P", "L", "RGBA", "LA", "CMYK"])
def test_image_modes_with_at_most_eight_bits_per_channel_are_accepted(path: Path, mode: str) -> None:
    white = np.full((3, 2, 3), 255, np.uint8)
    content = image_bytes(white, "JPEG" if mode == "CMYK" else "PNG", mode)
    assert np.array_equal(read(path, content), np.moveaxis(white, 2, 0))
    for height, width in ((1, 9), (13, 11)) if mode != "CMYK" else ():
        pixels = random_bytes(height, width, 3)
        bits = {"bits": 2} if mode == "P" else {}
        noise = image_bytes(pixels, "PNG", mode, **bits)
        assert read(path, noise).shape == (3, height, width), "the size is right at all widths and depths"


@pytest.mark.parametrize("alpha", [254, 0])
def test_image_with_transparent_pixels_is_refused(path: Path, alpha: int) -> None:
    pixels = np.dstack([COLOURS, np.full((5, 7), 255, np.uint8)])
    pixels[4, 6, 3] = alpha
    with refused(f"'{path}' has transparent pixels; opaque ones are allowed: put it on a background"):
        read(path, image_bytes(pixels, "PNG"))


def test_image_with_sixteen_bit_pixels_is_refused(path: Path) -> None:
    buffer = BytesIO()
    Image.fromarray(np.full((2, 2), 40_000, np.uint16)).save(buffer, "PNG")
    with refused(f"'{path}' has pixels of Pillow's mode I;16; 8 bits per channel are allowed: convert it"):
        read(path, buffer.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animated_image_is_refused(path: Path, kind: str) -> None:
    buffer = BytesIO()
    frames = [Image.fromarray(random_bytes(4, 4, 3, rng_seed=place)) for place in range(3)]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    with refused(f"'{path}' holds 3 pictures; one per file is allowed: split it"):
        read(path, buffer.getvalue())


@pytest.mark.parametrize("content", [b"", b"\x89PNG", b"RIFF1234WAVE", image_bytes(GREYS, "GIF")])
def test_image_file_of_another_format_or_with_a_damaged_header_is_refused(path: Path, content: bytes) -> None:
    with refused(
        f"'{path}' is none of PNG, JPEG, BMP, WEBP, or its header is damaged; only these are read: convert it"
    ):
        read(path, content)


@every_kind
def test_truncated_image_file_is_refused(path: Path, kind: str) -> None:
    content = image_bytes(COLOURS, kind)
    for damaged in (content[: len(content) // 2], content[: 3 * len(content) // 4]):
        with refused(f"'{path}' cannot be decoded", "a whole image is expected there: copy or download"):
            read(path, damaged)


def test_png_with_a_wrong_checksum_is_refused(path: Path) -> None:
    content = bytearray(png_bytes(COLOURS))
    content[-20] ^= 1  # The flipped bit is in the last chunk of pixels of the PNG file.
    with refused(f"'{path}' cannot be decoded"):
        read(path, bytes(content))


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None], ids=["Pillow limit on", "Pillow limit off"])
@pytest.mark.parametrize(("height", "width"), [(8192, 8193), (9000, 10_000), (2**31 - 1, 2**31 - 1)])
def test_too_large_images_are_refused_before_memory_is_allocated(
    path: Path, monkeypatch: pytest.MonkeyPatch, height: int, width: int, limit: int | None
) -> None:
    """With its default settings, Pillow only issues a warning for an image of 9000×10000 pixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    tracemalloc.start()
    try:
        with refused(f"'{path}' ", "pixels"):
            read(path, huge_bmp(height, width))
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
