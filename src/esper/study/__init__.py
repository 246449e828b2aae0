"""Comparisons of arms (controllers or settings) over paired rng seeds at equal compute: ``esper study FILE``.

Module ``study_config`` reads the study file, ``phases`` lists the runs of each phase, ``one_run`` executes a
run, ``study_journal`` records finished runs, and ``study_results`` writes the tables of results.
"""
