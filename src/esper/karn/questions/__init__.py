"""Questions about a run: each module computes the numbers from the rows and draws them."""
