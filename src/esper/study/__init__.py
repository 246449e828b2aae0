"""Comparisons: arms × rng seeds under equal conditions, in parallel.

``run_study`` is for scripts: arms in, cells out. ``esper study FILE`` conducts a whole comparison at equal
compute: ``config`` reads the file, ``conduct`` asks for runs in phases, ``running`` does one of them,
``journal`` keeps what is done, ``outcome`` makes tables of it.
"""

from esper.study.cells import Cell, means_by_rng_seed, run_cell, run_study

__all__ = ["Cell", "means_by_rng_seed", "run_cell", "run_study"]
