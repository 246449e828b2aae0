"""Exporters of runs to other tools, such as TensorBoard; they read the files of a run, and no training calls
them.
"""
