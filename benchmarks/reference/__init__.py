"""Reference implementations in plain PyTorch, for comparisons of speed."""
