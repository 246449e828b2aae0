"""Reader of image files; the image format is recognised by content, and incomplete files are refused.

Damage inside the pixel data of JPEG, BMP and WebP is not detected, because these formats have no checksum;
the checksum of PNG is verified.
"""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Final, NamedTuple

from PIL import Image, UnidentifiedImageError

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import AGAIN, read_bytes

WANTED: Final = "an image file"
FORMATS: Final = ("PNG", "JPEG", "BMP", "WEBP")
MAX_PIXELS: Final = 1 << 26  # Largest accepted image, 8192 × 8192 pixels; Pillow's limit can be disabled.
EIGHT_BIT_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow image modes with at most 8 bits per channel; Pillow would silently clip pixels with more bits to
255."""


class Pixels(NamedTuple):
    """Pixels and size of a decoded image."""

    planes: bytes
    """Bytes of the image's pixels, channel by channel and row by row."""
    height: int
    width: int


def read_image(path: Path) -> Pixels:
    """Decode an image as RGB; EXIF rotation is not applied.

    Raises:
        DataError: The file is no supported image, is damaged, or has transparent or too many pixels.
    """
    content = bytes(read_bytes(path, WANTED))
    try:
        with warnings.catch_warnings():
            # Pillow only warns of suspiciously large images and invalid metadata; the warnings become errors.
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                image.verify()  # Image.verify() checks the checksums of a PNG file.
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                _check(image, path)
                bands = _opaque(image, path).convert("RGB").split()
                return Pixels(b"".join(band.tobytes() for band in bands), image.height, image.width)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(
            f"'{path}' is none of {', '.join(FORMATS)}, or its header is damaged; only these are read:"
            f" convert it, {AGAIN}, or take it away"
        ) from error
    except Exception as error:
        # The image file is in memory, so every exception is caused by its content; Pillow's decoders raise
        # many types of exceptions.
        raise DataError(
            f"'{path}' cannot be decoded ({str(error) or type(error).__name__}); a whole image is expected"
            f" there: {AGAIN}, or save it anew with an image program"
        ) from error


def _check(image: Image.Image, path: Path) -> None:
    """Check size, mode and number of frames in an image's header, before memory is allocated for pixels."""
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"'{path}' states {image.height} × {image.width} pixels; at most {MAX_PIXELS} are allowed:"
            " make it smaller"
        )
    if image.mode not in EIGHT_BIT_MODES:
        raise DataError(
            f"'{path}' has pixels of Pillow's mode {image.mode}; 8 bits per channel are allowed: convert it"
        )
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise DataError(f"'{path}' holds {frames} pictures; one per file is allowed: split it")


def _opaque(image: Image.Image, path: Path) -> Image.Image:
    """Return the image without its alpha channel, which must be opaque everywhere."""
    if not image.has_transparency_data:
        return image
    colours = image.convert("RGBA")
    if colours.getchannel("A").getextrema() != (255, 255):
        raise DataError(
            f"'{path}' has transparent pixels; opaque ones are allowed: put it on a background of your choice"
        )
    return colours
