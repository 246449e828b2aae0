"""Several environments that train on the minibatches of a step together."""

from collections.abc import Sequence
from typing import Any

from esper.kasmina.recovery import ROLLBACK_LIMIT
from esper.leyline import ActionSpace, EnvFacts, EpochFacts, EventSink, IntArray, PolicyOutput, SlotTable
from esper.tolaria.devices import DEFAULT_DEVICE, Amp, Compute, device_of
from esper.tolaria.env import MorphEnv
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.host_training import train_together
from esper.tolaria.tasks.spec import TaskSpec


class SerialVector:
    """Environments that share one slot table and nothing else; all run in one process."""

    def __init__(
        self,
        task: TaskSpec,
        *,
        rng_seed: int,
        env_indices: Sequence[int] = (0,),
        enabled: Sequence[bool] | None = None,
        sink: EventSink | None = None,
        rollback_limit: int = ROLLBACK_LIMIT,
        devices: Sequence[str] = (DEFAULT_DEVICE.name,),
        amp: Amp = "off",
    ) -> None:
        """Build the environments; call ``reset`` before the first step.

        Args:
            task: Task of every environment.
            rng_seed: Root seed of the run.
            env_indices: Numbers of the environments in the run; they select random streams and devices, so
                that a run can be split into shards.
            enabled: Slots that may be used; all unless given.
            sink: Receives the rows of all environments.
            rollback_limit: Number of rollbacks at which an episode ends.
            devices: Names of devices, assigned to the environments in turn.
            amp: Precision of training.
        """
        self.table = SlotTable.empty(len(env_indices), task.num_slots)
        self.envs = [
            MorphEnv(
                task,
                rng_seed=rng_seed,
                env=index,
                enabled=enabled,
                table=self.table.row(row),
                sink=sink,
                rollback_limit=rollback_limit,
                compute=Compute(device_of(index, devices), amp),
            )
            for row, index in enumerate(env_indices)
        ]
        self._facts: dict[int, EnvFacts] = {}
        self._stepped: list[int] = []

    @property
    def action_space(self) -> ActionSpace:
        """Slots, rules and blueprints that a controller can choose from; available after ``reset``."""
        return self.envs[0].action_space

    def reset(self, episode: int = 0, twin_scores: Sequence[float] | None = None) -> EpochFacts:
        """Begin an episode in every environment and return the facts of every environment."""
        for row in range(len(self.envs)):
            self.reset_env(row, episode, twin_scores=twin_scores)
        return self.facts

    def reset_env(self, row: int, episode: int, **settings: Any) -> None:
        """Begin an episode in one environment; ``settings`` are arguments of ``MorphEnv.reset``."""
        self._facts[row] = self.envs[row].reset(episode, **settings)

    @property
    def facts(self) -> EpochFacts:
        """Last facts of every environment."""
        return EpochFacts.stack([self._facts[row] for row in range(len(self.envs))])

    def step(self, actions: IntArray) -> EpochFacts:
        """Step every environment by ``actions [env, 8]``, except environments whose episode has ended."""
        self._stepped = [row for row, env in enumerate(self.envs) if not env.ended]
        if not self._stepped:
            raise RuntimeError("all episodes have ended; call reset() for the next ones")
        for row in self._stepped:
            self.envs[row].begin_step(actions[row])
        train_together([self.envs[row].host for row in self._stepped])
        for row in self._stepped:
            self._facts[row] = self.envs[row].end_step()
        return self.facts

    def record_decisions(self, outputs: Sequence[PolicyOutput] | None) -> None:
        """Emit the rows of the last decisions, with the policy's output for each environment."""
        for row in self._stepped:
            self.envs[row].recorder.decision(None if outputs is None else outputs[row])

    def finish(self) -> list[EpisodeReport]:
        """Return the reports of the committed networks."""
        return [env.finish() for env in self.envs]
