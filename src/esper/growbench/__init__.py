"""GrowBench: recorded decisions of growth, which can be loaded, replayed and regenerated bit for bit."""

from typing import TYPE_CHECKING, Final

from esper.lazy_names import lazy_names

if TYPE_CHECKING:
    from esper.growbench.evaluation import evaluate
    from esper.growbench.replay import FEATURES, Cell, load
    from esper.growbench.store import RecordingError

_MODULES: Final = {
    "FEATURES": "esper.growbench.replay",
    "Cell": "esper.growbench.replay",
    "RecordingError": "esper.growbench.store",
    "evaluate": "esper.growbench.evaluation",
    "load": "esper.growbench.replay",
}
__all__ = [*_MODULES]
__getattr__ = lazy_names(__name__, _MODULES)
