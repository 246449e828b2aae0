"""Readers of data sets: IDX, CIFAR-10 binary, class folders of images, plain text.

A reader returns the complete data set or raises a ``DataError`` of one sentence.
"""
