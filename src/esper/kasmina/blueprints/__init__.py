"""Blueprints; importing this package registers the built-in blueprints."""

from esper.kasmina.blueprints import conv as _conv  # noqa: F401  registers on import
from esper.kasmina.blueprints import stack as _stack  # noqa: F401
from esper.kasmina.blueprints import tokens as _tokens  # noqa: F401
from esper.kasmina.blueprints import widen as _widen  # noqa: F401
from esper.kasmina.blueprints.registry import BlueprintSpec as BlueprintSpec
from esper.kasmina.blueprints.registry import Mirrored as Mirrored
from esper.kasmina.blueprints.registry import Topology as Topology
from esper.kasmina.blueprints.registry import all_blueprints as all_blueprints
from esper.kasmina.blueprints.registry import blueprint_named as blueprint_named
from esper.kasmina.blueprints.registry import blueprint_names as blueprint_names
from esper.kasmina.blueprints.registry import register_blueprint as register_blueprint
from esper.kasmina.blueprints.registry import specs_for as specs_for
from esper.kasmina.blueprints.registry import unregister_blueprint as unregister_blueprint
