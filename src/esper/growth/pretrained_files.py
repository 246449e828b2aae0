"""Files of grown models of transformers, in which ``save_pretrained`` also writes the edits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

from torch import nn

from esper.kasmina.edit_list import beyond_configuration
from esper.kasmina.older_states import edits_of
from esper.leyline.errors import GrowthWarning

_METHOD: Final = "save_pretrained"


class PretrainedSaver:
    """Method ``save_pretrained`` of one finished model, which also writes the edits to ``esper.json``.

    It is an attribute of the model. The pickle of a finished model must not need Esper, so an unpickled model
    has the method of its class.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def __call__(self, save_directory: Any, *args: Any, is_main_process: bool = True, **settings: Any) -> Any:
        """Save the model as its class does, then write the edits; see ``PreTrainedModel.save_pretrained``."""
        from esper.kasmina.network_file import save_edits  # noqa: PLC0415  needed for files only

        method = getattr(type(self._net), _METHOD)
        result = method(self._net, save_directory, *args, is_main_process=is_main_process, **settings)
        if is_main_process:
            save_edits(self._net, Path(save_directory))
        return result

    def __reduce__(self) -> Any:
        return getattr, (self._net, _METHOD)

    def __deepcopy__(self, memo: Any) -> PretrainedSaver:
        return PretrainedSaver(copy.deepcopy(self._net, memo))


def save_edits_with(net: nn.Module) -> None:
    """Let ``save_pretrained`` of a finished model write the edits that its configuration does not describe,
    if there are any."""
    if any(beyond_configuration(edits_of(net))):
        vars(net)[_METHOD] = PretrainedSaver(net)
        GrowthWarning.issue(
            f"from_pretrained of {type(net).__name__} would leave out seeds, new hidden units, or alphas of"
            " blocks below 1; read a folder of save_pretrained with esper.hf.from_pretrained(folder)"
        )
