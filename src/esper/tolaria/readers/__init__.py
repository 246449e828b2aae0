"""Data sets from files: IDX, CIFAR-10 binary, class folders of images, plain text, and where to find them.

A reader gives back the whole data set or raises a ``DataError`` of one sentence; it never gives a part.
"""

from esper.tolaria.readers.cifar import read_cifar_binary
from esper.tolaria.readers.files import list_folder, read_bytes
from esper.tolaria.readers.folders import read_image_folder, read_split_folders
from esper.tolaria.readers.idx import read_idx, read_labelled_idx
from esper.tolaria.readers.parts import Part
from esper.tolaria.readers.places import find_data
from esper.tolaria.readers.text import read_text, windows

__all__ = [
    "Part",
    "find_data",
    "list_folder",
    "read_bytes",
    "read_cifar_binary",
    "read_idx",
    "read_image_folder",
    "read_labelled_idx",
    "read_split_folders",
    "read_text",
    "windows",
]
