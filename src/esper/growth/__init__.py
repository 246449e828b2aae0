"""Growth of a user's own network in the user's own loop."""

from esper.growth.sites import Site, find_sites
from esper.growth.slot import RESERVED, Graft, GrowthSlot, attach, detach

__all__ = ["RESERVED", "Graft", "GrowthSlot", "Site", "attach", "detach", "find_sites"]
