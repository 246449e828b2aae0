"""Growth of a user's own network in the user's own loop."""

from esper.growth.adding import add
from esper.growth.diagnosing import diagnose
from esper.growth.diagnosis import Diagnosis
from esper.growth.events import GrowthEvent
from esper.growth.grow import Grown, grow
from esper.growth.growth import Growth
from esper.growth.saving import load
from esper.growth.sites import Site, find_sites
from esper.leyline.errors import GrowthWarning

__all__ = ["Diagnosis", "Grown", "Growth", "GrowthEvent", "GrowthWarning", "Site"]
__all__ += ["add", "diagnose", "find_sites", "grow", "load"]
