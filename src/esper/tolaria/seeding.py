"""Independent random streams of an episode, derived from rng seed, environment, episode and name."""

from dataclasses import dataclass
from typing import Final

from torch import Generator

from esper.kasmina.random_streams import TorchStream
from esper.leyline.stream_seeds import derive_seed
from esper.tolaria.devices import DEFAULT_DEVICE, Device

TRAINING_SEEDS: Final = range(1_000_000)
"""Root rng seeds for training and tuning."""
SELECTION_SEEDS: Final = range(1_000_000, 2_000_000)
"""Root rng seeds for choosing between policies or settings by the validation split."""
TEST_SEEDS: Final = range(2_000_000, 3_000_000)
"""Root rng seeds for reported results.

Test rng seeds that were used, as offsets from 2,000,000: 0 to 19 in experiments 001, 002, 011, 012 and 013,
and 100 to 119 in experiment 005. Experiment 002 chose the initialisation of planted seeds on the test rng
seeds with offsets 0 to 9. ``esper eval`` uses the test rng seeds from offset 0 on. Test rng seeds with
offsets from 1,000 on are for final comparisons only: experiments 014, 015, 017 and 018 used 1,000 to 1,005,
experiment 020 used 2,000 to 2,019, experiment 022 used 2,200 to 2,214.
"""


@dataclass(frozen=True, slots=True)
class EpisodeStreams:
    """Random streams of one attempt at an episode; each stream has a name such as ``init`` or ``batches``."""

    rng_seed: int
    env: int
    episode: int
    attempt: int = 0
    device: Device = DEFAULT_DEVICE

    def seed(self, *purpose: str) -> int:
        """Return the rng seed of the random stream that is named ``purpose``."""
        attempt = ("attempt", self.attempt) if self.attempt else ()
        return derive_seed(self.rng_seed, "env", self.env, "episode", self.episode, *attempt, *purpose)

    def torch(self, *purpose: str) -> TorchStream:
        """Return a random stream as a context, for layers that draw from torch's global generator."""
        return TorchStream(self.seed(*purpose), self.device.torch)

    def slot(self, slot_id: str, *purpose: str) -> TorchStream:
        """Return the random stream for initial weights, dropout and sampled alphas of the seeds in one
        slot.
        """
        return self.torch("slot", slot_id, *purpose)

    def generator(self, *purpose: str) -> Generator:
        """Return a new torch generator, for functions with a ``generator`` argument."""
        return Generator().manual_seed(self.seed(*purpose))
