"""Files of runs: atomic writes, the writer's lock, names of row files, the cache folder. Importing
``esper.files`` does not import torch."""
