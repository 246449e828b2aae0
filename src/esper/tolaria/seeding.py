"""Named random streams of one environment's episode: nothing that happens in one reaches another."""

from dataclasses import dataclass
from typing import Final

from torch import Generator

from esper.kasmina.random_streams import TorchStream
from esper.leyline.stream_seeds import derive_seed
from esper.tolaria.devices import DEFAULT_DEVICE, Device

TRAINING_SEEDS: Final = range(1_000_000)
"""Root seeds to train and tune on."""
SELECTION_SEEDS: Final = range(1_000_000, 2_000_000)
"""Root seeds to choose between candidates with, on the validation split."""
TEST_SEEDS: Final = range(2_000_000, 3_000_000)
"""Root seeds for reported numbers.

Experiments 001, 002, 011, 012 and 013 ran the first 20, and 005 those from 100 to 119; how a seed starts was
decided on the first 10 (002). ``esper eval`` takes the first so many. From 1,000 on they are for final
comparisons only: 014, 015, 017 and 018 ran those up to 1,005, 020 those from 2,000 to 2,019, 022 from 2,200
to 2,214.
"""


@dataclass(frozen=True, slots=True)
class EpisodeStreams:
    """The streams of (run, environment, episode, attempt); each is named by its purpose."""

    rng_seed: int
    env: int
    episode: int
    attempt: int = 0
    device: Device = DEFAULT_DEVICE

    def seed(self, *purpose: str) -> int:
        attempt = ("attempt", self.attempt) if self.attempt else ()
        return derive_seed(self.rng_seed, "env", self.env, "episode", self.episode, *attempt, *purpose)

    def torch(self, *purpose: str) -> TorchStream:
        """A stream to enter, for layers that draw from torch's global generator."""
        return TorchStream(self.seed(*purpose), self.device.torch)

    def slot(self, slot_id: str, *purpose: str) -> TorchStream:
        """Initialisation, dropout and sampled alphas of the seeds in one slot."""
        return self.torch("slot", slot_id, *purpose)

    def generator(self, *purpose: str) -> Generator:
        """A generator for explicit draws."""
        return Generator().manual_seed(self.seed(*purpose))
