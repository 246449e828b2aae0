"""Hosts: the networks that seeds grow into."""

from esper.kasmina.hosts.base import Host, SegmentedHost
from esper.kasmina.hosts.cnn import CNNHost, ResidualHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.kasmina.hosts.wrapped import WrappedHost

__all__ = ["CNNHost", "Host", "ResidualHost", "SegmentedHost", "TransformerHost", "WrappedHost"]
