"""Growth of a user's own network in the user's own loop."""

from esper.growth.adding import add
from esper.growth.diagnosing import diagnose
from esper.growth.diagnosis import Diagnosis
from esper.growth.events import GrowthEvent
from esper.growth.growth import Growth
from esper.growth.sites import Site, find_sites
from esper.leyline.errors import GrowthWarning

__all__ = ["Diagnosis", "Growth", "GrowthEvent", "GrowthWarning", "Site", "add", "diagnose", "find_sites"]
