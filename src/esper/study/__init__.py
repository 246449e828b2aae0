"""Comparisons of arms over paired rng seeds at equal compute: ``esper study FILE``.

``study_config`` reads the file, ``phases`` lists the runs of each phase, ``one_run`` runs one of them,
``study_journal`` records finished runs, ``study_results`` writes the tables.
"""
