"""Next-byte prediction on text: Python source, its documentation, C++ headers, or a text file of the user."""

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.data import GuardedTest, Samples, Splits
from esper.tolaria.readers.files import find_data, read_bytes, read_text
from esper.tolaria.tasks.spec import NEXT_TOKEN, InstanceDistribution, TaskSpec, scaling_study

VOCABULARY: Final = 256
CONTEXT: Final = 32
TEXT_FILE: Final = "text.txt"
BLOCK: Final = 16
"""Number of consecutive text windows that are in the same split, because neighbouring text repeats words."""
VALIDATION: Final = 256
TEST: Final = 512
"""Number of text windows in the test split."""
MODULES: Final = """
argparse ast calendar configparser csv difflib fractions gettext gzip heapq
inspect optparse pdb pickle shutil statistics tarfile textwrap threading zipfile
"""


def split_text(
    content: bytes, context: int, generator: torch.Generator, validation: int = VALIDATION
) -> Splits:
    """Return random splits of text windows of ``context`` bytes; a block of neighbouring windows stays in one
    split."""
    held_out = (validation // BLOCK, TEST // BLOCK)
    needed = (sum(held_out) + 1) * BLOCK * context + 1
    if len(content) < needed:
        raise DataError(
            f"a text of {len(content)} bytes is too short; in windows of {context} bytes, training,"
            f" validation and test need at least {needed}: put a longer text there"
        )
    inputs, targets = _windows(content, context)
    blocks = len(inputs) // BLOCK
    train = blocks - sum(held_out)
    order = torch.randperm(blocks, generator=generator)
    parts = [
        Samples(inputs, targets, (BLOCK * index[:, None] + torch.arange(BLOCK)).flatten())
        for index in order.split([train, *held_out])
    ]
    return Splits(parts[0], parts[1], GuardedTest(parts[2]))


def windows(tokens: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and next-token targets ``[window, context]`` of a sequence of tokens.

    The windows of ``context`` tokens do not overlap; an incomplete window at the end is dropped.
    """
    if context < 1:
        raise DataError(f"a context of {context} tokens was asked for; ask for at least 1")
    if tokens.ndim != 1 or len(tokens) < context + 1:
        raise DataError(
            f"tokens of shape {list(tokens.shape)} cannot fill one window; {context} of context and one to"
            " predict are needed in a row: give a longer text or a shorter context"
        )
    used = (len(tokens) - 1) // context * context
    return tokens[:used].reshape(-1, context), tokens[1 : used + 1].reshape(-1, context)


@lru_cache(maxsize=4)
def _windows(content: bytes, context: int) -> tuple[Tensor, Tensor]:
    """Return all text windows as inputs and targets, cached for all episodes and environments."""
    return windows(torch.frombuffer(bytearray(content), dtype=torch.uint8).long(), context)


@cache
def _library_source() -> bytes:
    names = MODULES.split()
    return b"".join(read_bytes(_source_of(name), f"the source of the module '{name}'") for name in names)


def _source_of(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise DataError(
            f"the source of Python's module '{name}' is not installed, so there is no pycode to read;"
            " install Python with its library sources"
        )
    return Path(found.origin)


def _ascii(content: bytes) -> bytes:
    """Return a text with every character outside of ASCII replaced by a question mark."""
    return content.decode("utf-8", "replace").encode("ascii", "replace")


def _ascii_source() -> bytes:
    """Return the source of Python's library in ASCII."""
    return _ascii(_library_source())


def _files_of_torch(*patterns: str) -> Iterator[bytes]:
    """Yield the content of the files of the package torch that match the globs, sorted by path."""
    root = Path(torch.__file__).parent
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        yield bytes(read_bytes(path, "a file of the package torch"))


@cache
def _documentation() -> bytes:
    """Return the topics of Python's ``help`` and the docstrings of ``torch.nn``, in ASCII."""
    topics = ast.parse(bytes(read_bytes(_source_of("pydoc_data.topics"), "the help of Python")))
    parts = [node.value for node in ast.walk(topics) if isinstance(node, ast.Constant)]
    for content in _files_of_torch("nn/**/*.py"):
        nodes = ast.walk(ast.parse(content))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        parts += [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
    return _ascii("\n\n".join(part for part in parts if isinstance(part, str)).encode())


@cache
def _headers() -> bytes:
    """Return the C++ headers of ATen's core and of c10, in ASCII."""
    return _ascii(b"".join(_files_of_torch("include/ATen/core/**/*.h", "include/c10/**/*.h")))


_read_text = cache(read_text)


def _own_text() -> bytes:
    return _read_text(find_data(TEXT_FILE, "put any plain text there, encoded as UTF-8")).encode()


def _loader(
    source: Callable[[], bytes], context: int = CONTEXT, validation: int = VALIDATION
) -> Callable[[torch.Generator], Splits]:
    return lambda generator: split_text(source(), context, generator, validation)


def _digest(source: Callable[[], bytes]) -> Callable[[], str]:
    """Return a function that returns the SHA-256 of the text that ``source`` returns."""
    return lambda: hashlib.sha256(source()).hexdigest()


PYCODE = TaskSpec(
    name="pycode",
    summary="Python's library by the byte, a GPT of three lean layers",
    input_shape=(CONTEXT,),
    classes=VOCABULARY,
    load=_loader(_library_source),
    digest=_digest(_library_source),
    instances=InstanceDistribution(widths=((32, 32, 32),), learning_rates=(0.01,)),
    objective=NEXT_TOKEN,
    host="gpt",
    optimiser="adamw",
    batch_size=32,
    batches_per_epoch=32,
)
SCALING_CONTEXT: Final = 64
SCALING_VALIDATION: Final = 128
"""Number of validation windows; 128 windows of 64 characters are as much text as 256 windows of 32."""
ASCII: Final = 128
PYCODE_SCALING = scaling_study(
    replace(
        PYCODE,
        name="pycode_scaling",
        summary="Python's library by the character, a GPT of one layer that may become six; 2 TFLOP",
        input_shape=(SCALING_CONTEXT,),
        classes=ASCII,
        load=_loader(_ascii_source, SCALING_CONTEXT, SCALING_VALIDATION),
        instances=InstanceDistribution(widths=((32,) * 5,), learning_rates=(4e-3,), trunks=(1,)),
        feed_forward=4,
    ),
    budget=2 * 10**12,
)


def _corpus(name: str, summary: str, source: Callable[[], bytes]) -> TaskSpec:
    """Return the scaling task of another text in ASCII, with the host of ``pycode_scaling``."""
    return replace(
        PYCODE_SCALING,
        name=name,
        summary=f"{summary} by the character, a GPT of one layer that may become six",
        load=_loader(source, SCALING_CONTEXT, SCALING_VALIDATION),
        digest=_digest(source),
        budget=600 * 10**9,
    )


PROSE_SCALING = _corpus("prose_scaling", "English documentation of Python and torch", _documentation)
HEADERS_SCALING = replace(_corpus("headers_scaling", "C++ headers of torch", _headers), held_out=True)
GRU_SCALING = replace(
    PROSE_SCALING,
    name="gru_scaling",
    summary="English documentation by the character, residual GRU of one layer that may become four",
    input_shape=(CONTEXT,),
    load=_loader(_documentation),
    instances=InstanceDistribution(widths=((32,) * 3,), learning_rates=(4e-3,), trunks=(1,)),
    host="gru",
    budget=160 * 10**9,
)


@cache
def text_scaling(file: Path | None) -> TaskSpec:
    """Return the scaling task of a text by the byte: ``file``, or the data set ``text.txt``."""
    source = _own_text if file is None else lambda: _read_text(file).encode()
    task = _corpus("text_scaling", "A text file of your own", source)
    return replace(task, classes=VOCABULARY, summary=task.summary.replace("character", "byte"))


TEXT = replace(
    PYCODE,
    name="text",
    summary="A text file of your own by the byte, a GPT of three lean layers",
    load=_loader(_own_text),
    digest=_digest(_own_text),
)
