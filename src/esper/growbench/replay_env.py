"""Gymnasium environment ``esper/GrowBench-v0``, which replays recorded decisions of growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from esper.growbench.instances import DECISION_POINTS
from esper.growbench.replay import SIZE, UNRECORDED, Features, load
from esper.growbench.store import PACKAGED
from esper.leyline import InvalidActionError

BOUND = 1e6
"""Bound of the values of an observation, far above those of any recording."""


class GrowBenchEnv(gymnasium.Env[Features, np.int64]):
    """Replay of one recorded training per episode: at every decision point wait (0) or insert a block (1).

    The reward is 0 until the end, and then minus the regret of the plan in percent of the loss. ``info`` has
    the ``action_mask`` of recorded actions, and at the end ``plan`` and ``regret``.

    Args:
        folder: Folder of the recording; the packaged one unless given.
        families: Families to draw from; all families of the recording unless given.

    Raises:
        RecordingError: There is no recording in the folder, or a file is damaged.

    Example:
        >>> env = gymnasium.make("esper/GrowBench-v0", families=("gpt", "mlp"))
        >>> observation, info = env.reset(seed=0)
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium declares it

    def __init__(self, folder: Path | str = PACKAGED, families: tuple[str, ...] | None = None) -> None:
        self.cells = [c for c in load(folder) if families is None or c.first.family in families]
        if not self.cells:
            raise InvalidActionError(
                f"the recording has no instance of the families {families}; choose others"
            )
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-BOUND, BOUND, (SIZE,), np.float32)
        # Rows of nodes as lists, because indexing a list is several times faster than indexing an array.
        self._trees = [(list(c.observations), c.children.tolist(), list(c.plans)) for c in self.cells]
        self._masks = [np.asarray(c.children != UNRECORDED, np.int8) for c in self.cells]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Features, dict[str, Any]]:
        """Begin the replay of the cell number ``options["cell"]``, or of a random one."""
        super().reset(seed=seed)
        chosen = (options or {}).get("cell")
        self._cell = int(self.np_random.integers(len(self.cells))) if chosen is None else int(chosen)
        self._observations, self._children, self._plans = self._trees[self._cell]
        return self._seen(0)

    def step(self, action: np.int64 | int) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Wait or grow, and go on to the next decision point.

        Raises:
            RecordingError: The plan was not recorded; the error names the nearest recorded plan.
            InvalidActionError: The action is neither 0 nor 1.
        """
        if action not in (0, 1):
            raise InvalidActionError(f"action {action} is neither 0 (wait) nor 1 (insert a block)")
        child = self._children[self._node][action]
        if child >= 0:
            seen, info = self._seen(child)
            return seen, 0.0, False, False, info
        cell = self.cells[self._cell]
        if child == UNRECORDED:
            plan, at = list(cell.nodes)[self._node]
            raise cell.unrecorded((*plan, DECISION_POINTS[at]) if action else plan)
        plan = self._plans[-2 - child]
        regret = cell.regret(plan)
        info = {"plan": plan, "regret": regret, "action_mask": np.zeros(2, np.int8)}
        return self._observations[self._node].copy(), -regret, True, False, info

    def _seen(self, node: int) -> tuple[Features, dict[str, Any]]:
        self._node = node
        return self._observations[node].copy(), {"action_mask": self._masks[self._cell][node].copy()}

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which actions were recorded, in the form that MaskablePPO reads."""
        return self._masks[self._cell][self._node].astype(np.bool_)
