"""Vector of environments that train together, minibatch by minibatch, in one process."""

from collections.abc import Sequence
from typing import Any

from esper.leyline import ActionSpace, EnvFacts, EpochFacts, IntArray, PolicyOutput, SlotTable
from esper.tolaria.devices import DEFAULT_DEVICE, Amp, Compute, device_of
from esper.tolaria.env import EpisodeReport, MorphEnv, step_together
from esper.tolaria.tasks.spec import TaskSpec


class SerialVector:
    """Environments that run in one process and share one slot table, with a row for each environment."""

    def __init__(
        self,
        task: TaskSpec,
        *,
        rng_seed: int,
        env_indices: Sequence[int] = (0,),
        devices: Sequence[str] = (DEFAULT_DEVICE.name,),
        amp: Amp = "off",
        **settings: Any,
    ) -> None:
        """Build the environments; call ``reset`` before the first step.

        Args:
            task: Task of every environment.
            rng_seed: Root of all random streams of the run.
            env_indices: Numbers of the environments in the run, by which random streams and devices are
                selected, so that a run can be split into shards.
            devices: Names of devices, assigned to the environments in turn.
            amp: Precision of training.
            settings: Arguments of every ``MorphEnv``: ``enabled``, ``sink`` and ``rollback_limit``.
        """
        self.table = SlotTable.empty(len(env_indices), task.num_slots)
        self.envs = [
            MorphEnv(
                task,
                rng_seed=rng_seed,
                env=index,
                table=self.table.row(row),
                compute=Compute(device_of(index, devices), amp),
                **settings,
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
        """Begin an episode in every environment and return the measurements of the untrained hosts."""
        for row in range(len(self.envs)):
            self.reset_env(row, episode, twin_scores=twin_scores)
        return self.facts

    def reset_env(self, row: int, episode: int, **settings: Any) -> None:
        """Begin an episode in one environment; ``settings`` are arguments of ``MorphEnv.reset``."""
        self._facts[row] = self.envs[row].reset(episode, **settings)

    @property
    def facts(self) -> EpochFacts:
        """Measurements of every environment after its last epoch."""
        return EpochFacts.stack([self._facts[row] for row in range(len(self.envs))])

    def step(self, actions: IntArray) -> EpochFacts:
        """Run one step with ``actions [env, head]`` in every environment whose episode has not ended."""
        self._stepped = [row for row, env in enumerate(self.envs) if not env.ended]
        if not self._stepped:
            raise RuntimeError("all episodes have ended; call reset() for the next ones")
        facts = step_together([(self.envs[row], actions[row]) for row in self._stepped])
        self._facts.update(zip(self._stepped, facts, strict=True))
        return self.facts

    def record_decisions(self, outputs: Sequence[PolicyOutput] | None) -> None:
        """Emit the telemetry rows of the last decisions, with the policy's output for each environment."""
        for row in self._stepped:
            self.envs[row].recorder.emit_last_action(None if outputs is None else outputs[row])

    def finish(self) -> list[EpisodeReport]:
        """Return the episode reports of all environments, with test scores of the committed networks."""
        return [env.finish() for env in self.envs]
