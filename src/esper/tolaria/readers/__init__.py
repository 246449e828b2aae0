"""Readers of data sets: IDX and CIFAR-10 (``binary``), class folders of images, plain text (``files``).

A reader returns the complete data set or raises a ``DataError`` of one sentence.
"""
