"""The page over all runs of a folder: a small server on this machine, and what a browser shows of it."""
