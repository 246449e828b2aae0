"""Growth of a user's own network: in the user's loop, in one call, or after a diagnosis."""

from esper.growth.diagnose import diagnose, plant
from esper.growth.diagnosis_report import Diagnosis
from esper.growth.grow import Grown, grow
from esper.growth.growth import Growth
from esper.growth.growth_events import GrowthEvent
from esper.kasmina.checkpoint import load
from esper.kasmina.sites import Site, find_sites
from esper.leyline.errors import GrowthWarning

__all__ = ["Diagnosis", "Grown", "Growth", "GrowthEvent", "GrowthWarning", "Site"]
__all__ += ["diagnose", "find_sites", "grow", "load", "plant"]
