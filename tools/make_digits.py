"""Make digits.npz, the digits data that Esper contains, from the copy that scikit-learn ships.

    python tools/make_digits.py            write digits.npz next to the digits task and print its SHA-256
    python tools/make_digits.py --check    compare the committed file with that copy; exit 1 on a difference

This script needs scikit-learn, which is one of the optional dependencies `data` of Esper. The archive
digits.npz is the same byte for byte in every run, because order, dates and permissions of its members are
fixed. Only another build of zlib may compress the archive differently, so `--check` compares the unpacked
members.
"""

import argparse
import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TASKS = Path(__file__).resolve().parents[1] / "src" / "esper" / "tolaria" / "tasks"
ARCHIVE = TASKS / "digits.npz"
ATTRIBUTION = TASKS / "digits.md"

EARLIEST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)
UNIX = 3
READABLE_FILE = 0o100644 << 16


def read_digits() -> dict[str, NDArray[np.uint8]]:
    """Return uint8 arrays `images` [image, row, column] with values 0 to 16, and `labels` [image], for 1,797
    images.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415  an optional dependency

    source = load_digits()
    arrays = {"images": source.images.astype(np.uint8), "labels": source.target.astype(np.uint8)}
    if not np.array_equal(arrays["images"], source.images):
        raise ValueError("scikit-learn's digits are no longer whole numbers; uint8 would change them")
    return arrays


def encode_member(array: NDArray[np.uint8]) -> bytes:
    """Return the array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def pack(members: dict[str, bytes], *, compressed: bool = True) -> bytes:
    """Return an .npz archive whose bytes depend only on its members."""
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", compression=method, compresslevel=9) as archive:
        for name, payload in members.items():
            entry = zipfile.ZipInfo(name, date_time=EARLIEST_ZIP_DATE)
            entry.create_system = UNIX
            entry.external_attr = READABLE_FILE
            archive.writestr(entry, payload, compress_type=method, compresslevel=9)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return the content of each member of an .npz archive, by name."""
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def find_differences(members: dict[str, bytes]) -> list[str]:
    """Return one sentence for each problem of the committed archive digits.npz and of its attribution
    file.
    """
    if not ARCHIVE.exists():
        return [f"{ARCHIVE.name} is missing; run this script without --check"]
    committed = ARCHIVE.read_bytes()
    differences = []
    if unpack(committed) != members:
        differences.append(f"{ARCHIVE.name} does not hold what scikit-learn ships")
    digest = hashlib.sha256(committed).hexdigest()
    if not ATTRIBUTION.exists() or digest not in ATTRIBUTION.read_text(encoding="utf-8"):
        differences.append(f"{ATTRIBUTION.name} does not name the SHA-256 of {ARCHIVE.name}: {digest}")
    return differences


def main() -> int:
    """Write the archive digits.npz, or check the committed archive."""
    parser = argparse.ArgumentParser(description="Make or check the embedded digits data.")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    check = parser.parse_args().check

    members = {f"{name}.npy": encode_member(array) for name, array in read_digits().items()}
    if check:
        differences = find_differences(members)
        print("\n".join(differences) or f"{ARCHIVE.name} is what scikit-learn ships")
        return 1 if differences else 0

    packed = pack(members)
    ARCHIVE.write_bytes(packed)
    print(f"{ARCHIVE.name}: {len(packed)} bytes, SHA-256 {hashlib.sha256(packed).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
