"""Page of a run, rendered from templates to a file (``esper report``) or by the server (``esper serve``)."""
