"""Data sets from files: IDX, CIFAR-10 binary, class folders of images, plain text, and where to find them.

A reader gives back the whole data set or raises a ``DataError`` of one sentence; it never gives a part.
"""
