"""Hosts: the networks that seeds grow into."""

from esper.kasmina.hosts.base import Host
from esper.kasmina.hosts.cnn import CNNHost, ResidualHost
from esper.kasmina.hosts.transformer import TransformerHost

__all__ = ["CNNHost", "Host", "ResidualHost", "TransformerHost"]
