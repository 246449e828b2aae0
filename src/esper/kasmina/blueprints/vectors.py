"""Blueprints for features ``[batch, width]``: those of tokens that look at one token at a time."""

from functools import partial

from esper.kasmina.blueprints.registry import register_blueprint
from esper.kasmina.blueprints.tokens import TokenNorm, feed_forward, low_rank

register_blueprint("norm", "features")(TokenNorm)
register_blueprint("lora", "features")(partial(low_rank, rank=8))
register_blueprint("lora_large", "features")(partial(low_rank, rank=32))
register_blueprint("mlp_small", "features")(partial(feed_forward, times=2))
register_blueprint("mlp", "features")(partial(feed_forward, times=4))
