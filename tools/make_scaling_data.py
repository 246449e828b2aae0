"""Make the data files of the scaling tasks that Esper contains: clothes, glyphs and diamonds (.npz.xz).

    python -m tools.make_scaling_data SOURCES            write the files and print their SHA-256
    python -m tools.make_scaling_data SOURCES --check    compare the committed files; exit 1 on a difference

SOURCES is a folder with these files, unpacked from the packages that scaling_data.md names:

    train-images-idx3-ubyte, train-labels-idx1-ubyte    of Fashion-MNIST
    DejaVuSans.ttf and the other eleven fonts of FONTS
    diamonds.csv

Glyphs are rendered by Pillow and FreeType, so another version of these may give other pixels.
"""

import argparse
import csv
import hashlib
import io
import lzma
import sys
import unicodedata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tools.make_digits import encode_member, pack

TASKS = Path(__file__).resolve().parents[1] / "src" / "esper" / "tolaria" / "tasks"
Arrays = dict[str, NDArray[np.generic]]

CLOTHES = 16_000
SCRIPTS = [
    "ARABIC",
    "ARMENIAN",
    "CANADIAN",
    "CYRILLIC",
    "GEORGIAN",
    "GREEK",
    "HEBREW",
    "LAO",
    "LATIN",
    "TIFINAGH",
]
"""First words of the Unicode names of the characters of each class."""
SLANTS = {"Sans": "Oblique", "SansMono": "Oblique", "Serif": "Italic"}
FONTS = [
    f"DejaVu{family}{style}.ttf"
    for family, slant in SLANTS.items()
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
]
SIDE, FONT_SIZE = 16, 14
ORDERED = {
    "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"],
    "color": list("JIHGFED"),
    "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
}
"""Grades of a diamond from worst to best."""


def clothes(sources: Path) -> Arrays:
    """Return the first 16,000 training images of Fashion-MNIST in 16 grey levels, and their labels."""
    pixels = np.fromfile(sources / "train-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 28, 28)
    labels = np.fromfile(sources / "train-labels-idx1-ubyte", np.uint8)[8:]
    return {"images": pixels[:CLOTHES] >> 4, "labels": labels[:CLOTHES]}


def glyphs(sources: Path) -> Arrays:
    """Return images of the letters of ten scripts in twelve fonts, with script and code point of each."""
    images, labels, codes = [], [], []
    letters = [
        (code, SCRIPTS.index(word))
        for code in range(0x1_0000)
        if unicodedata.category(chr(code))[0] == "L"
        and (word := unicodedata.name(chr(code), "?").split()[0]) in SCRIPTS
    ]
    for name in FONTS:
        font = ImageFont.truetype(sources / name, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
        missing = _drawn(font, "\uffff")
        for code, script in letters:
            image = _drawn(font, chr(code))
            if image.any() and not np.array_equal(image, missing):
                images.append(image >> 4)
                labels.append(script)
                codes.append(code)
    return {
        "images": np.array(images),
        "labels": np.array(labels, np.uint8),
        "groups": np.array(codes, np.uint16),
    }


def _drawn(font: ImageFont.FreeTypeFont, letter: str) -> NDArray[np.uint8]:
    """Return a letter, white on black, with the middle of its outline in the middle of the image."""
    image = Image.new("L", (SIDE, SIDE))
    left, top, right, bottom = font.getbbox(letter)
    place = ((SIDE - left - right) // 2, (SIDE - top - bottom) // 2)
    ImageDraw.Draw(image).text(place, letter, fill=255, font=font)
    return np.asarray(image)


def diamonds(sources: Path) -> Arrays:
    """Return nine properties and the price of 53,940 diamonds as whole numbers; lengths in hundredths."""
    with (sources / "diamonds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = [
        [ORDERED[name].index(row[name]) for name in ORDERED]
        + [round(100 * float(row[name])) for name in ("carat", "depth", "table", "x", "y", "z")]
        for row in rows
    ]
    return {
        "inputs": np.array(inputs, np.int16),
        "price": np.array([int(r["price"]) for r in rows], np.int16),
    }


FILES = {"clothes": clothes, "glyphs": glyphs, "diamonds": diamonds}


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return the content of each member of a compressed archive, by name."""
    with np.load(io.BytesIO(lzma.decompress(packed))) as archive:
        return {name: archive[name].tobytes() for name in archive.files}


def main() -> int:
    """Write the data files, or check the committed ones."""
    parser = argparse.ArgumentParser(description="Make or check the embedded data of the scaling tasks.")
    parser.add_argument("sources", type=Path, help="folder with the original files")
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    given = parser.parse_args()
    wrong = []
    for name, make in FILES.items():
        arrays, path = make(given.sources), TASKS / f"{name}.npz.xz"
        if given.check:
            if unpack(path.read_bytes()) != {key: array.tobytes() for key, array in arrays.items()}:
                wrong.append(f"{path.name} differs from its sources")
            continue
        members = {f"{key}.npy": encode_member(array) for key, array in arrays.items()}
        packed = lzma.compress(pack(members, compressed=False), preset=9 | lzma.PRESET_EXTREME)
        path.write_bytes(packed)
        shapes = ", ".join(f"{key} {array.dtype} {list(array.shape)}" for key, array in arrays.items())
        print(f"{path.name}: {len(packed)} bytes, {hashlib.sha256(packed).hexdigest()}; {shapes}")
    print("\n".join(wrong) or "done")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
