"""Growth of a user's own network in the user's own loop."""

from esper.growth.events import GrowthEvent
from esper.growth.growth import Growth
from esper.growth.sites import Site, find_sites
from esper.leyline.errors import GrowthWarning

__all__ = ["Growth", "GrowthEvent", "GrowthWarning", "Site", "find_sites"]
