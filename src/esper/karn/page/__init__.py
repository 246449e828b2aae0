"""The page of a run, from one set of templates: as a file (``esper report``) or live (``esper serve``)."""
