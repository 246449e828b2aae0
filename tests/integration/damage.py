"""Random damage to the files of runs, checkpoints, studies and saved networks.

Each function of type ``Damage`` takes a random generator and the content of a file, and returns the damaged
content.
"""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

DIGITS = "9" * 5_000
DEEP = "[" * 1_000 + "]" * 1_000

Damage = Callable[[random.Random, bytes], bytes]
STRANGE = (
    *(
        DIGITS.encode(),
        b"1e308",
        b"-1",
        b"-1.5",
        b"7",
        b"99",
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'""',
        b"1e999",
    ),
    *(b'"[/b]"', b'"\xff\xfe"', b'"\\ud800"', b'"\\u001b[31m"', DEEP.encode()),
)
"""Values that replace a value of a JSON file: wrong types, rare numbers, invalid text."""
VALUE = re.compile(rb'(?<=":)\s*(-?[\d.e+-]+|"[^"]*"|null|true|false)')
ITEM = re.compile(rb'(?<=[\[,])(-?[\d.e+-]+|"[^"]*")(?=[\],])')


def damaged(rng: random.Random, original: Path, folder: Path, pattern: str = "*") -> tuple[Path, str]:
    """Return a copy of ``original`` in which one file is damaged, and a description of the damage.

    Args:
        rng: Source of all random choices.
        original: Folder to copy.
        folder: Folder that is emptied first; the copy is a subfolder with the name "run".
        pattern: Glob pattern of the names of files that may be damaged.
    """
    copy = folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, copy)
    files = sorted(path for path in copy.rglob(pattern) if path.is_file() and path.stat().st_size)
    path, how = rng.choice(files), rng.choice((*TEXT_DAMAGE, remove))
    if how is remove:
        path.unlink()
    else:
        path.write_bytes(how(rng, path.read_bytes()))
    return copy, f"{how.__name__} {path.relative_to(copy)}"


def remove(rng: random.Random, content: bytes) -> bytes:
    """Stand for the deletion of a file; ``damaged`` deletes it."""
    return b""


def flip(rng: random.Random, content: bytes) -> bytes:
    """Flip one to five bits."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 6)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def empty(rng: random.Random, content: bytes) -> bytes:
    return b""


def zero(rng: random.Random, content: bytes) -> bytes:
    """Replace a block by zero bytes, as some file systems do after a power failure."""
    start = rng.randrange(len(content))
    size = min(rng.randrange(1, 4096), len(content) - start)
    return content[:start] + bytes(size) + content[start + size :]


def exchange(rng: random.Random, content: bytes) -> bytes:
    """Replace one value of a JSON file by a value of another type or range."""
    found = [*VALUE.finditer(content), *ITEM.finditer(content)]
    if not found:
        return flip(rng, content)
    value = rng.choice(found)
    return content[: value.start()] + rng.choice(STRANGE) + content[value.end() :]


def count(rng: random.Random, content: bytes) -> bytes:
    """Replace one whole number by a negative or larger one, such as a negative epoch."""
    found = [match for match in VALUE.finditer(content) if match[1].isdigit()]
    if not found:
        return flip(rng, content)
    value = rng.choice(found)
    changed = rng.choice((b"-" + value[1], b"1" + value[1], b"%d" % (int(value[1]) + 1)))
    return content[: value.start(1)] + changed + content[value.end(1) :]


def rename(rng: random.Random, content: bytes) -> bytes:
    """Change one name of a JSON file, such as that of a head, an op or a column."""
    found = list(re.finditer(rb'"(\w+)"', content))
    if not found:
        return flip(rng, content)
    name = rng.choice(found)
    return content[: name.end(1)] + b"x" + content[name.end(1) :]


def swap(rng: random.Random, content: bytes) -> bytes:
    """Exchange two lines."""
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        return cut(rng, content)
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    return b"".join(lines)


def repeat(rng: random.Random, content: bytes) -> bytes:
    """Write one line twice."""
    lines = content.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def drop(rng: random.Random, content: bytes) -> bytes:
    """Remove one line."""
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


TEXT_DAMAGE: tuple[Damage, ...] = (
    *(flip, cut, zero, empty, exchange, exchange, exchange, count, count, rename, rename, swap, repeat, drop),
)
