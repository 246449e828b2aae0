"""Evaluate a rule of one's own on recorded decisions of growth, with one family of networks left out.

The packaged recording is replayed, so nothing is trained and the example takes seconds.
"""

import numpy as np

from esper.growbench import FEATURES, evaluate, load


class WaitForNoise:
    """Insert a block when a doubling of the compute gains less than a multiple of the validation noise."""

    def fit(self, cells):
        noise = np.concatenate([c.observations[:, FEATURES.index("val_noise")] for c in cells])
        self.limit = 3.0 * np.median(noise)

    def grows(self, observation):
        at = FEATURES.index("gain_per_doubling")
        return bool(observation[at + len(FEATURES)]) and observation[at] < self.limit


found = evaluate(load(), WaitForNoise)
print(f"regret to the best recorded plan: {found.mean} % over {len(found.by_instance)} instances")
