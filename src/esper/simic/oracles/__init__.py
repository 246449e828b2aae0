"""Oracle environments with a known optimum: tests, experiments and benchmarks of the learner use them."""
