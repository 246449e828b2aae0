"""One image file as bytes of pixels: formats are told by content, and a file that is not whole is refused.

What cannot be noticed: damage inside the data of a JPEG, BMP or WebP is other pixels, since these formats
have no checksum. PNG has one and it is compared.
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
MAX_PIXELS: Final = 1 << 26  # 8192 × 8192; said here because Pillow's own limit can be switched off
EIGHT_BIT_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow would clip deeper pixels to 255 without a word."""


class Pixels(NamedTuple):
    """One decoded image."""

    planes: bytes
    """Channel by channel, row by row."""
    height: int
    width: int


def read_image(path: Path) -> Pixels:
    """Decode one image as RGB.

    Pixels come as they are stored: a rotation that a camera noted in the file is not carried out.
    """
    content = bytes(read_bytes(path, WANTED))
    try:
        with warnings.catch_warnings():
            # Pillow warns of images too large to be honest, and of metadata it cannot make sense of.
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                image.verify()  # the checksums, where there are any
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
        # All is in memory by now, so any exception is about the content; Pillow's decoders raise many kinds.
        raise DataError(
            f"'{path}' cannot be decoded ({str(error) or type(error).__name__}); a whole image is expected"
            f" there: {AGAIN}, or save it anew with an image program"
        ) from error


def _check(image: Image.Image, path: Path) -> None:
    """What the header tells, before memory is taken for the pixels."""
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
    """The image without its transparency, which must hide nothing."""
    if not image.has_transparency_data:
        return image
    colours = image.convert("RGBA")
    if colours.getchannel("A").getextrema() != (255, 255):
        raise DataError(
            f"'{path}' has transparent pixels; opaque ones are allowed: put it on a background of your choice"
        )
    return colours
